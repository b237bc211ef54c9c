"""Ends a worker that does not leave a round that is over: the last means against a rank that stays blocked.

The worker is told, its sockets are shut down, its waits are interrupted; what is blocked even so (a raw collective of
the script's, a driver) only the end of the process frees. torchrun then starts it again.

*Runs in* the agent: one timer thread for each worker that is to be free. *Owns* the timers.
*Fails by* nothing: a process that is gone already is what was wanted.
"""

from __future__ import annotations

import threading

from elastic_trainer.agent.ending import end_now
from elastic_trainer.agent.roster import Life, Worker

FIRST_STEP_S = 600.0
"""The first step of a life may compile the model."""


class Release:
    """See the module. ``sever_timeout_s`` is the least time that a worker gets; ``lock`` guards lives and workers."""

    def __init__(self, sever_timeout_s: float, lock: threading.RLock) -> None:
        self._sever_timeout_s, self._lock = sever_timeout_s, lock
        self._timers: dict[int, threading.Timer] = {}

    def limit_s(self, life: Life, worker: Worker) -> float:
        """How long ``worker`` may take: two of its steps, and a whole compilation before the first."""
        step_s = worker.ready.step_time_s if worker.ready is not None else 0.0
        return max(self._sever_timeout_s, 2.0 * step_s, 0.0 if life.steps else FIRST_STEP_S)

    def expect(self, life: Life, worker: Worker, number: int) -> None:
        """Round ``number`` is over: ``worker`` is to say soon that it is free. Called with the lock held."""
        self.freed(worker)
        timer = threading.Timer(self.limit_s(life, worker), self._end, args=(life, worker, number))
        timer.daemon = True
        self._timers[worker.pid] = timer
        timer.start()

    def freed(self, worker: Worker) -> None:
        """``worker`` is free, or gone. Called with the lock held."""
        timer = self._timers.pop(worker.pid, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Nobody is to be ended any more."""
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def _end(self, life: Life, worker: Worker, number: int) -> None:
        with self._lock:
            stuck = worker.ready is not None and worker.inside and worker.free_for() <= number
            if worker.pid not in self._timers or life.ended or worker.left is not None or not stuck:
                return
            del self._timers[worker.pid]
            end_now(worker.pid, f"it did not leave round {number}, which is over")
