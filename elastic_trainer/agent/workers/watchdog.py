"""Kills workers of this node that answer no ping: frozen ones, and those whose interpreter is locked.

A thread of each worker does nothing but answer. A worker that does not answer cannot hear either that a round is over,
and all others wait for it. Its death is news at once, torchrun starts it again, and the others go on. A worker that
answers but makes no progress is found by its heartbeat page (:mod:`elastic_trainer.agent.health.duties`).

*Runs in* the agent: a thread named ``watchdog``. *Owns* that thread.
*Fails by* nothing: a worker that is gone meanwhile is what was wanted.
*Invariant*: time in which the agent itself stood still counts for nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elastic_trainer.agent.workers.duty import Duty
from elastic_trainer.agent.workers.kill import Verdicts
from elastic_trainer.agent.workers.roster import Worker
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.ipc.channel import ChannelClosedError
from elastic_trainer.ipc.messages import Ping
from elastic_trainer.telemetry.logs import logger

ASKED_EVERY_S = 1.0
QUESTIONS_PER_LIMIT = 8
LATE = 3.0
"""The agent stood still if a turn comes this many times later than planned."""


class Watchdog:
    """See the module. ``workers()`` are those to watch now; ``limit_s`` 0: none is ever ended."""

    def __init__(
        self, limit_s: float, workers: Callable[[], Iterable[Worker]], verdicts: Verdicts, clock: Clock = SYSTEM
    ) -> None:
        self._limit_s, self._workers, self._verdicts, self._clock = limit_s, workers, verdicts, clock
        self.every_s = min(ASKED_EVERY_S, limit_s / QUESTIONS_PER_LIMIT)
        self._looked_at = clock.monotonic()
        self._duty = Duty("watchdog", self.look, clock)

    def start(self) -> None:
        """Begin to watch, if there is a limit."""
        if self._limit_s > 0.0:
            self._duty.start()

    def close(self) -> None:
        self._duty.close()

    def look(self) -> float:
        """One turn: end the workers that have been silent for too long, ask the others; seconds until the next."""
        now = self._clock.monotonic()
        stood_still = now - self._looked_at > LATE * self.every_s
        self._looked_at = now
        for worker in self._workers():
            if stood_still or not worker.heard_at:
                worker.heard_at = now
            elif now - worker.heard_at > self._limit_s:
                self._end(worker, now - worker.heard_at)
                continue
            ping(worker, now)
        return self.every_s

    def _end(self, worker: Worker, silent_s: float) -> None:
        state = process_state(worker.pid)
        if state == "traced":
            worker.heard_at = self._clock.monotonic()
            logger().warning("worker.silent", pid=worker.pid, silent_s=round(silent_s, 1), state=state)
            return
        reason = f"it has answered nothing for {silent_s:.1f} s (state: {state})"
        self._verdicts.end(worker.pid, reason, local_rank=worker.local_rank)


def ping(worker: Worker, now: float) -> None:
    """Ask ``worker`` whether it is there."""
    if not worker.pinged_at:
        worker.pinged_at, worker.queued = now, queued_s(worker.pid)
    with contextlib.suppress(ChannelClosedError):
        worker.connection.send(Ping())


def starved_s(worker: Worker) -> float:
    """How long ``worker`` could not have answered since it was asked: the longest that one of its threads has waited
    for a CPU."""
    now = queued_s(worker.pid)
    return max((now[each] - worker.queued[each] for each in now.keys() & worker.queued.keys()), default=0.0)


def queued_s(pid: int) -> Mapping[str, float]:
    """Seconds that each thread of ``pid`` was ready to run and had no CPU, in all its life; none where the kernel does
    not count them (sched-stats.rst, /proc/PID/task/TID/schedstat)."""
    found = {}
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").iterdir():
            found[each.name] = int((each / "schedstat").read_text().split()[1]) / 1e9
    return found


def process_state(pid: int) -> str:
    """What the kernel says a process does: ``traced`` (by a debugger), ``stopped``, ``running``, ...; or unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if int(fields.get("TracerPid", "0")):
        return "traced"
    return fields.get("State", "unknown").strip().partition("(")[2].rstrip(")") or "unknown"
