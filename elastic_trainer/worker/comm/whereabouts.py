"""Finds ranks that have come to different places of the script, where each waits for the others for ever.

One has left its loop, or evaluates alone, while another is inside a step: they wait in different process groups, and
nothing would end that before a timeout of minutes. A rank that stays where it is for long, and is not inside a step,
says so in the round's store, with how many steps it has begun and how many collectives of the control group. One that
is inside a later step, and has begun fewer of these, cannot have come by there: the script differs between the two. It
tells all, and each ends with one sentence about both.

*Runs in* a thread for each round. *Owns* two keys of the round's store.
*Fails by* ending the process, if its main thread does not notice that its collectives were ended.
*Invariant*: what a rank says stays true when it has moved on, since counts are compared, not times.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.telemetry.logs import complain, final_message, logger
from elastic_trainer.worker.comm.control import CallsDifferError
from elastic_trainer.worker.comm.groups import Group

UNNAMED = "local"
"""The node of a process whose launcher names none."""
LOOK_S = 0.5
LEAST_S = 1.0
STEPS = 3.0
"""A rank looks when it has stayed where it is for this many steps' time, and LEAST_S."""
GRACE_S = 3 * LOOK_S
"""From the moment when one rank knows until the first one ends: all read the sentence meanwhile."""
END_S = 15.0
_AGAIN_S = 0.05
_OUTSIDE, _PARTED, _CALLS = "whereabouts/outside", "whereabouts/parted", "whereabouts/calls"
HINT = "all ranks must make the same steps and calls: decide by what they have in common, such as session.all_reduce()"


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rank is: inside a step or not, the steps begun in this round and committed ever, and what it does."""

    inside: bool
    begun: int
    step: int
    doing: str


class Whereabouts:
    """See the module. ``stand()`` says where the main thread is, ``free(round)`` ends what it waits for in C++."""

    def __init__(
        self,
        group: Group,
        node: str,
        stand: Callable[[], Stand],
        span_s: Callable[[], float],
        free: Callable[[int], object],
    ) -> None:
        self._store, self._control = group.fresh, group.control
        self._stand, self._span_s, self._free = stand, span_s, free
        self._who = f"rank {self._control.rank}" + (f" (node {node})" if node != UNNAMED else "")
        self._before, self._round = self._control.begun, group.formation.round
        self._parted = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None and not self._control.alone:
            self._thread = threading.Thread(
                target=copy_context().run, args=(self._watch,), name="whereabouts", daemon=True
            )
            self._thread.start()

    @property
    def error(self) -> ConfigError | None:
        """Why the ranks cannot go on together, once it is known."""
        return ConfigError(self._parted, hint=HINT) if self._parted else None

    def compared(self, error: CallsDifferError) -> ConfigError:
        """What ``error`` does not know: who else called what. All ranks come here, unless one is in a step."""
        own, rank, others = self._control.newest, self._control.rank, range(self._control.world_size)
        mine = self._place(self._stand())
        deadline, found = Deadline.after(GRACE_S), ""
        try:
            self._store.set(f"{_CALLS}/{rank}", json.dumps([own, mine]))
            while not found and not deadline.expired:
                keys = [f"{_CALLS}/{each}" for each in others if self._store.check([f"{_CALLS}/{each}"])]
                said = [json.loads(self._store.get(key)) for key in keys]
                found = next((theirs for call, theirs in said if call != own), "")
                self._closed.wait(_AGAIN_S)
        except (RuntimeError, ValueError):  # the store is gone
            return error
        first, second = sorted((mine, found))
        return ConfigError(f"{first}, and {second}", hint=error.hint) if found else error

    def close(self) -> None:
        """The round has ended."""
        self._closed.set()

    def join(self) -> None:
        """After :meth:`close`, before the process ends: Python must not end the thread inside torch's store."""
        if self._thread is not None:
            self._thread.join(LEAST_S)

    def _watch(self) -> None:
        seen, since = (self._stand(), 0), SYSTEM.monotonic()
        while not self._closed.wait(LOOK_S):
            now, where = SYSTEM.monotonic(), (self._stand(), self._control.begun - self._before)
            if where != seen or self._control.works.over.is_set():
                seen, since = where, now
            elif now - since >= max(LEAST_S, STEPS * self._span_s()):
                try:
                    self._parted = self._compared(*where)
                except (RuntimeError, ValueError) as error:  # the store is gone, and the round with it
                    logger().debug("whereabouts.unknown", reason=str(error).partition("\n")[0])
                    return
                if self._parted:
                    self._part()
                    return

    def _compared(self, stand: Stand, collectives: int) -> str:
        """What all are told; empty if nothing is known to be wrong."""
        if self._store.check([_PARTED]):
            return str(self._store.get(_PARTED).decode())
        if not stand.inside:
            self._store.set(_OUTSIDE, json.dumps([stand.begun, collectives, self._place(stand)]))
        elif self._store.check([_OUTSIDE]):
            begun, theirs, place = json.loads(self._store.get(_OUTSIDE))
            if begun < stand.begun and collectives < theirs:
                sentence = f"{place}, and {self._who} is inside step {stand.step + 1}"
                self._store.set(_PARTED, sentence)
                return sentence
        return ""

    def _place(self, stand: Stand) -> str:
        return f"{self._who} {stand.doing} after step {stand.step}"

    def _part(self) -> None:
        """Let all others read it; then end what the main thread waits for, until the session is closed."""
        logger().error("ranks.parted", reason=self._parted)
        self._closed.wait(GRACE_S)
        self._control.works.end(self._parted)
        ends_at = SYSTEM.monotonic() + END_S
        while SYSTEM.monotonic() < ends_at:
            self._free(self._round)
            if self._closed.wait(LOOK_S):
                return
        complain(ConfigError(self._parted, hint=HINT), sys.stderr)
        final_message()
        os._exit(EXIT_CONFIG)
