"""A worker's way from round to round in place: leave a broken or drained one, meet the others in the next.

*Runs in* the worker's main thread; the link's thread calls ``sever`` to free it when the round is over.
*Owns* the process groups of the present round and the sockets beneath them.
*Fails by* the link ending the process (no agent, run closed); every other failure leads to another round.
*Invariant*: a store prefix, a store connection and a group belong to one round only; nothing of an abandoned group is
waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import RejoinError, RoundBrokenError, TransientError
from elastic_trainer.ipc.messages import StateReport
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.failures import is_collective_failure, summary, trail
from elastic_trainer.worker.comm.link import Formation
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.comm.sever import Sockets
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.inplace.agent_link import ChannelLink

SEVER_AGAIN_S = 0.005
SEVER_AGAIN_LONGEST_S = 0.5


class Rounds:
    """See the module. ``idle()`` is called while this worker waits for a round, about once a second."""

    def __init__(
        self, link: ChannelLink, *, form_timeout_s: float, group_timeout_s: float, clock: Clock = SYSTEM
    ) -> None:
        self.link = link
        self._form_timeout_s, self._group_timeout_s, self._clock = form_timeout_s, group_timeout_s, clock
        self._sockets = Sockets()
        self._inside = threading.Event()
        self._number = 0
        self._works = InterruptibleWaits()
        self._group: groups.Group | None = None
        link.on_over = self._over

    @property
    def number(self) -> int:
        """The round that this worker is in or was in last."""
        return self._number

    def descriptors(self) -> list[int]:
        """What the present group holds open."""
        return self._sockets.descriptors()

    def enter(
        self,
        placement: Placement,
        report: Callable[[], StateReport | None],
        settle: Callable[[groups.Group], None],
        *,
        planned: bool = False,
        joinable: bool = True,
        newcomer: bool = False,
        following: Formation | None = None,
        idle: Callable[[], None] = lambda: None,
        step_time_s: float = 0.0,
        forming: Callable[[], object] = lambda: None,
    ) -> groups.Group:
        """Come into a round with a group formed and ``settle(group)`` done (all ranks hold one state).

        ``report()`` names the state held here. ``following`` is the place that a planned change has agreed on already.
        ``forming()`` is called when a place is known.
        """
        if following is not None:
            self.link.ready(following.round, report(), planned=True, step_time_s=step_time_s)
        while True:
            formation = following
            following = None
            if formation is None:
                first = max(self._number, self.link.over) + 1
                self.link.ready(
                    first,
                    report(),
                    planned=planned,
                    joinable=joinable,
                    newcomer=newcomer,
                    step_time_s=step_time_s,
                )
                formation = self.link.await_formation(first, idle)
            planned = False
            if formation is None:
                continue
            forming()
            try:
                return self._form(formation, placement, settle)
            except (RejoinError, TransientError, RuntimeError) as error:
                if not is_collective_failure(error):
                    raise
                logger().info("round.not_entered", round=formation.round, error=summary(error), trail=trail(error))
                self.link.failed(formation.round, summary(error), forming=True)
                self.abandon()
                self.link.await_over(formation.round)

    def _form(self, formation: Formation, placement: Placement, settle: Callable[[groups.Group], None]) -> groups.Group:
        self._number = formation.round
        self._works = InterruptibleWaits(interruptible=True)
        self._sockets.forming(groups.store_ends(formation))
        self._inside.set()
        if self.link.broken(formation.round) is not None:
            raise RejoinError(f"round {formation.round} is broken already")
        why = f"round {formation.round} was not formed within {self._form_timeout_s:g} s"
        limit = threading.Timer(self._form_timeout_s, self._free, (why,))
        started = self._clock.monotonic()
        try:
            over = partial(self.link.broken, formation.round)
            patience = groups.FormTimeouts(self._form_timeout_s, self._group_timeout_s)
            group = groups.form_in_place(formation, placement, patience, limit.start, over, self._works)
            self._group = group
            self._sockets.formed(group.listening)
        finally:
            limit.cancel()
        formed_s = self._clock.monotonic() - started
        settle(group)
        settled_s = self._clock.monotonic() - started - formed_s
        logger().info(
            "round.entered",
            round=formation.round,
            rank=formation.rank,
            world_size=formation.world_size,
            form_s=round(formed_s, 4),
            settle_s=round(settled_s, 4),
        )
        return group

    def check_device(self, device: torch.device) -> None:
        """Before an update on a CUDA device: wait for the gradients, and refuse those of a round that is over.

        CUDA runs behind the host, so after an abort the update would be computed from half-summed gradients.
        """
        torch.cuda.current_stream(device).synchronize()
        reason = self.link.broken(self._number)
        if reason is not None:
            raise RoundBrokenError(f"round {self._number} ended before its gradients were complete: {reason}")

    def confirms(self, error: BaseException) -> bool:
        """Whether ``error`` comes from the end of the present round.

        A failed collective is news: the agent is told, and its word that the round is broken is waited for. Anything
        else is the script's own error.
        """
        if not self._inside.is_set():
            return False
        if is_collective_failure(error):
            self._sockets.sever()  # peers learn of it at the speed of the network
            logger().warning("collective.failed", round=self._number, error=summary(error), trail=trail(error))
            self.link.failed(self._number, summary(error))
            return self.link.await_over(self._number)
        return False

    def abandon(self, *, planned: bool = False) -> None:
        """Give the present group up without waiting for anybody; ``planned``: nobody waits in it either."""
        if not planned:
            self._sockets.sever()
        self._works.end("the round was left")  # who still asks for something of it gets what is there by now
        self._inside.clear()
        self._sockets.forget()
        group, self._group = self._group, None
        groups.abandon(group)

    def _free(self, why: str) -> None:
        """Nobody waits in the present round any longer."""
        self._works.end(why)
        self._sockets.sever()

    def _over(self, number: int) -> None:
        """From the link's thread: free the main thread if it is in a round that is over."""
        if self._inside.is_set() and number >= self._number:
            groups.abort_nccl()
            self._free("the round ended in the middle of a collective")
            threading.Thread(target=self._sever_until_free, args=(self._number,), name="sever", daemon=True).start()

    def _sever_until_free(self, number: int) -> None:
        """Again until the main thread has left the group: a socket may have been busy the first time."""
        pause_s = SEVER_AGAIN_S
        while self._inside.is_set() and self._number == number:
            self._clock.wait(threading.Event(), pause_s)
            pause_s = min(2.0 * pause_s, SEVER_AGAIN_LONGEST_S)  # an evaluation of its own may keep it for an hour
            if self._inside.is_set() and self._number == number:
                self._sockets.sever()
