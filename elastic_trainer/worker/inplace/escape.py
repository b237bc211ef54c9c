"""Frees a worker's main thread from the collectives of a round that is over.

*Runs in* the worker's main thread, which enters and leaves; the link's thread calls :meth:`Escape.over`.
*Owns* the sockets and the waits of the present round.
*Fails by* nothing. *Invariant*: nothing of a round that was left is severed any more.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.sever import End, Sockets
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

SEVER_AGAIN_S = 0.005
SEVER_AGAIN_LONGEST_S = 0.5


class Escape:
    """See the module. ``number`` is the round that this worker is in or was in last."""

    def __init__(self, tracker: HeartbeatReporter, clock: Clock = SYSTEM) -> None:
        self._tracker, self._clock = tracker, clock
        self.number = 0
        self._sockets = Sockets()
        self._inside = threading.Event()
        self._works = InterruptibleWaits()

    @property
    def inside(self) -> bool:
        return self._inside.is_set()

    def descriptors(self) -> list[int]:
        return self._sockets.descriptors()

    def enter(self, number: int, store: Collection[End]) -> InterruptibleWaits:
        """Round ``number`` is being formed through ``store``; returns its waits."""
        self.number = number
        self._works = InterruptibleWaits(self._tracker, interruptible=True)
        self._sockets.forming(store)
        self._inside.set()
        return self._works

    def formed(self, listening: Collection[End]) -> None:
        self._sockets.formed(listening)

    def leave(self, *, planned: bool) -> None:
        """Leave the round; ``planned``: no peer waits in it either."""
        if not planned:
            self._sockets.sever()
        self._works.end("the round was left")  # who still asks for something of it gets what is there by now
        self._inside.clear()
        self._sockets.forget()

    def sever(self) -> None:
        """Let peers learn at network speed that this rank has lost the round."""
        self._sockets.sever()

    def free(self, why: str) -> None:
        self._works.end(why)
        self._sockets.sever()

    def over(self, number: int) -> None:
        """Rounds up to ``number`` are over: free the main thread if it is in one of them."""
        if self._inside.is_set() and number >= self.number:
            groups.abort_nccl()
            self.free("the round ended in the middle of a collective")
            threading.Thread(target=self._sever_until_free, args=(self.number,), name="sever", daemon=True).start()

    def _sever_until_free(self, number: int) -> None:
        """Repeat until the main thread has left the group: a socket may have been busy the first time."""
        pause_s = SEVER_AGAIN_S
        while self._inside.is_set() and self.number == number:
            self._clock.wait(threading.Event(), pause_s)
            pause_s = min(2.0 * pause_s, SEVER_AGAIN_LONGEST_S)  # an evaluation of its own may keep it for an hour
            if self._inside.is_set() and self.number == number:
                self._sockets.sever()
