"""Sees to it that workers leave a round that is over: waits for those that are busy, ends those that stay blocked.

The worker is told, its sockets are shut down, its waits are interrupted; what is blocked even so (a raw collective of
the script's, a driver) only the end of the process frees. torchrun then starts it again. A worker that saves, evaluates
or compiles is not blocked: the time for that is the watchdog's business (:mod:`elastic_trainer.agent.health.duties`),
and the others are told what they wait for.

*Runs in* the agent: one timer thread for each worker that is to be free. *Owns* the timers.
*Fails by* nothing: a process that is gone already is what was wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from elastic_trainer.agent.workers.kill import kill_now
from elastic_trainer.agent.workers.roster import Life, Worker
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger

LONGEST_PAUSE_S: Final = 0.25
LOOKS_PER_LIMIT: Final = 8


class Release:
    """See the module. ``sever_timeout_s`` is the least that a blocked worker gets; ``lock`` guards lives and workers.

    ``busy(pid)`` says what a worker is busy with, empty if nothing; ``late(worker)`` is called with the lock held while
    one is not free.
    """

    def __init__(
        self,
        sever_timeout_s: float,
        lock: threading.RLock,
        busy: Callable[[int], str],
        late: Callable[[Worker], None] = lambda worker: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._sever_timeout_s, self._lock, self._clock = sever_timeout_s, lock, clock
        self._busy, self._late = busy, late
        self._pause_s = min(LONGEST_PAUSE_S, sever_timeout_s / LOOKS_PER_LIMIT)
        self._timers: dict[int, threading.Timer] = {}

    def limit_s(self, worker: Worker) -> float:
        """How long ``worker`` may take where it is not busy: two of its steps at least."""
        step_s = worker.ready.step_time_s if worker.ready is not None else 0.0
        return max(self._sever_timeout_s, 2.0 * step_s)

    def expect(self, life: Life, worker: Worker, number: int) -> None:
        """Round ``number`` is over: ``worker`` is to say soon that it is free. Called with the lock held."""
        self.freed(worker)
        self._look_later(life, worker, number, self._clock.monotonic())

    def freed(self, worker: Worker) -> None:
        """``worker`` is free, or gone. Called with the lock held."""
        worker.busy = ""
        timer = self._timers.pop(worker.pid, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Nobody is to be ended any more."""
        with self._lock:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def _look_later(self, life: Life, worker: Worker, number: int, blocked_at: float) -> None:
        """``blocked_at``: since when it has not been seen busy."""
        timer = threading.Timer(self._pause_s, self._look, args=(life, worker, number, blocked_at))
        timer.daemon = True
        self._timers[worker.pid] = timer
        timer.start()

    def _look(self, life: Life, worker: Worker, number: int, blocked_at: float) -> None:
        with self._lock:
            if self._timers.get(worker.pid) is not threading.current_thread():
                return
            del self._timers[worker.pid]
            if life.ended or worker.left is not None or not worker.stays_in(number):
                return
            now, busy = self._clock.monotonic(), self._known(worker)
            if not busy and now - blocked_at > self.limit_s(worker):
                kill_now(worker.pid, f"it did not leave round {number}, which is over")
                return
            self._note(worker, number, busy)
            self._look_later(life, worker, number, now if busy else blocked_at)

    def _known(self, worker: Worker) -> str:
        try:
            return self._busy(worker.pid)
        except Exception:  # noqa: BLE001 - the edge of a thread: whatever a page holds, the worker must leave
            logger().exception("page.unreadable", pid=worker.pid)
            return ""

    def _note(self, worker: Worker, number: int, busy: str) -> None:
        """What it was busy with last explains its delay until it is free: it has had no time to leave since."""
        if busy and busy != worker.busy:
            worker.busy = busy
            logger().info("worker.awaited", pid=worker.pid, local_rank=worker.local_rank, over=number, busy=busy)
        self._late(worker)
