"""Frees a worker's main thread from the collectives of a round that is over.

*Runs in* the worker's main thread, which enters and leaves; the link's thread calls :meth:`Escape.over`.
*Owns* the sockets and the waits of the present round.
*Invariant*: after a round is left, none of its sockets is severed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from elastic_trainer.clock import SYSTEM
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.sever import End, Sockets
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

SEVER_AGAIN_S = 0.005
SEVER_AGAIN_LONGEST_S = 0.5


class Escape:
    """See the module. ``number`` is the round that this worker is or was last in."""

    def __init__(self, tracker: HeartbeatReporter) -> None:
        self._tracker = tracker
        self.number = 0
        self.sockets = Sockets()
        self._inside = threading.Event()
        self._works = InterruptibleWaits()

    @property
    def inside(self) -> bool:
        return self._inside.is_set()

    def enter(self, number: int, store: Collection[End]) -> InterruptibleWaits:
        """Round ``number`` is being formed through ``store``; returns its waits."""
        self.number = number
        self._works = InterruptibleWaits(self._tracker, interruptible=True)
        self.sockets.forming(store, number)
        self._inside.set()
        return self._works

    def leave(self, *, planned: bool) -> None:
        """Leave the round; ``planned``: no peer waits in it either."""
        if not planned:
            self.sockets.sever()
        self._works.end("the round was left")  # a late wait returns what has arrived by now
        self._inside.clear()
        self.sockets.forget()

    def free(self, number: int, why: str) -> None:
        """Free the main thread if it still forms round ``number``."""
        works = self._works
        if self.number == number:
            works.end(why)
            self.sockets.sever(number)

    def over(self, number: int) -> None:
        """Rounds up to ``number`` are over: free the main thread if it is in one of them.

        By a planned change it may enter the next round meanwhile, whose waits and sockets are left alone.
        """
        works = self._works  # before the number: a round that begins sets its number first
        present = self.number
        if self._inside.is_set() and number >= present:
            groups.abort_nccl()
            works.abort()
            works.end("the round ended in the middle of a collective")
            self.sockets.sever(present)
            threading.Thread(target=self._sever_until_free, args=(present,), name="sever", daemon=True).start()

    def _sever_until_free(self, number: int) -> None:
        """Repeat until the main thread has left the group: a socket may have been busy the first time."""
        pause_s = SEVER_AGAIN_S
        while self._inside.is_set() and self.number == number:
            SYSTEM.wait(threading.Event(), pause_s)
            pause_s = min(2.0 * pause_s, SEVER_AGAIN_LONGEST_S)  # the main thread may be in an evaluation of an hour
            self.sockets.sever(number)
