"""Moves a worker from round to round in place: leave a broken or drained one, meet the others in the next.

*Runs in* the worker's main thread. *Owns* the process groups of the present round.
*Fails by* the link exiting the process (no agent, run closed); any other failure leads to another round.
*Invariant*: a store prefix, a store connection and a group belong to one round only; nothing waits for an abandoned
group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import RejoinError, RoundBrokenError, StepGivenUpError, TransientError
from elastic_trainer.ipc.messages import Drain, Ready
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.failures import is_collective_failure, summary, trail, tried
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.comm.round_place import RoundPlace
from elastic_trainer.worker.inplace.agent_link import ChannelLink
from elastic_trainer.worker.inplace.escape import Escape


@dataclass(frozen=True, slots=True)
class Formed:
    """A round that this worker has entered, and the seconds that it took to form."""

    group: groups.Group
    took_s: float


class Rounds:
    """See the module."""

    def __init__(
        self,
        link: ChannelLink,
        escape: Escape,
        placement: Placement,
        timeouts: groups.FormTimeouts,
        layout: ShardLayout | None = None,
    ) -> None:
        self._layout = layout
        self._link, self._escape, self._placement, self._timeouts = link, escape, placement, timeouts
        self._group: groups.Group | None = None
        """None between two rounds."""

    def enter(
        self, offer: Ready, idle: Callable[[], None], forming: Callable[[], object], place: RoundPlace | None = None
    ) -> Formed:
        """Join the next round, retrying while rounds fail to form.

        ``offer`` is this worker's announcement, ``place`` its place in a round that a planned change has already fixed.
        ``idle()`` is called about once a second while there is no round, ``forming()`` when a place is known.
        """
        if place is not None:
            self._link.ready(offer.model_copy(update={"number": place.round, "planned": True}))
        while True:
            if place is None:
                place = self._await_place(offer, idle)
            offer = offer.model_copy(update={"planned": False})
            if place is None:
                continue
            forming()
            try:
                return self._form(place)
            except (RejoinError, TransientError, RuntimeError) as error:
                self.give_up(place.round, error, place)
                place = None

    def _await_place(self, offer: Ready, idle: Callable[[], None]) -> RoundPlace | None:
        first = max(self._escape.number, self._link.over) + 1
        self._link.ready(offer.model_copy(update={"number": first}))
        return self._link.await_formation(first, idle)

    def give_up(self, number: int, error: BaseException, place: RoundPlace | None = None) -> None:
        """Give up round ``number`` because ``error`` kept its ranks from starting; raises any other error.

        ``place``: this worker's in it, if its groups were not formed. Else they were, so ranks reached each other.
        """
        if not is_collective_failure(error):
            raise error
        logger().info("round.not_entered", round=number, error=summary(error), trail=trail(error))
        if place is None:
            self._link.failed(number, summary(error))
        else:
            self._link.failed(number, summary(error), forming=True, tried=tried(error), loopback=place.misleads())
        self.abandon()
        self._link.await_over(number)

    def _form(self, formation: RoundPlace) -> Formed:
        works = self._escape.enter(formation.round, groups.store_ends(formation))
        if self._link.broken(formation.round) is not None:
            raise RejoinError(f"round {formation.round} is broken already")
        why = f"round {formation.round} was not formed within {self._timeouts.forming_s:g} s"
        limit = threading.Timer(self._timeouts.forming_s, self._escape.free, (formation.round, why))
        started = SYSTEM.monotonic()
        try:
            over = partial(self._link.broken, formation.round)
            group = groups.form_in_place(
                formation, self._placement, self._timeouts, limit.start, over, works, self._layout
            )
            self._group = group
            self._escape.sockets.formed(group.listening)
        finally:
            limit.cancel()
        return Formed(group, SYSTEM.monotonic() - started)

    def check_device(self, device: torch.device) -> None:
        """Before an update: refuse the gradients of a round that is over, on a CUDA device after a wait for them.

        CUDA runs asynchronously, so after an abort the update would use partially summed gradients.
        """
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        number = self._escape.number
        reason = self._link.broken(number)
        if reason is not None:
            raise RoundBrokenError(f"round {number} ended before its gradients were complete: {reason}")

    def confirms(self, error: BaseException) -> bool:
        """Whether ``error`` comes from the end of the present round; any other error is the script's.

        Reports a failed collective to the agent, then waits for the agent's message that the round is over.
        """
        if not self._escape.inside or not is_collective_failure(error):
            return False
        number = self._escape.number
        # Before the peers can notice: those who lose contact with a rank that gives its step up are not the cause.
        self._link.failed(number, summary(error), given_up=isinstance(error, StepGivenUpError))
        self._escape.sockets.sever()  # so that peers notice at network speed that this rank has left the round
        logger().warning("collective.failed", round=number, error=summary(error), trail=trail(error))
        return self._link.await_over(number)

    def abandon(self, *, planned: bool = False) -> None:
        """Drop the present group without waiting for peers; ``planned``: no peer waits in it either."""
        self._escape.leave(planned=planned)
        group, self._group = self._group, None
        groups.abandon(group)

    # ---- planned changes

    def drain(self) -> Drain | None:
        return self._link.drain(self._escape.number)

    def following(self, drain: Drain) -> RoundPlace | None:
        """This worker's place in the round that follows, if it has one."""
        return self._link.place(drain.next) if drain.next is not None else None
