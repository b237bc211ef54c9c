"""Kills workers of this node that answer no ping: frozen ones, and those that hold the interpreter lock.

A thread of each worker does nothing but answer. A worker that does not answer cannot learn that a round is over either,
and all others wait for it. Its death is noticed at once, torchrun restarts it, and the others continue. The heartbeat
page reveals a worker that answers but makes no progress (:mod:`elastic_trainer.agent.health.node_health`).

*Runs in* the agent: a thread named ``watchdog``. *Fails by* nothing: a worker that has already ended needs no kill.
*Invariant*: time in which the agent itself was frozen does not count against a worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elastic_trainer.agent.workers.roster import Worker
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.ipc.channel import ChannelClosedError
from elastic_trainer.ipc.messages import Ping
from elastic_trainer.telemetry.logs import logger

ASKED_EVERY_S = 1.0
QUESTIONS_PER_LIMIT = 8
LATE = 3.0
"""The agent was frozen if a turn comes this many times later than planned."""


class Watchdog:
    """See the module. ``workers()`` returns the workers to watch now; ``kill(pid, reason, local_rank=)`` ends one."""

    def __init__(
        self, limit_s: float, workers: Callable[[], Iterable[Worker]], kill: Callable[..., None], clock: Clock = SYSTEM
    ) -> None:
        self._limit_s, self._workers, self._kill, self._clock = limit_s, workers, kill, clock
        self.every_s = min(ASKED_EVERY_S, limit_s / QUESTIONS_PER_LIMIT)
        self._looked_at = clock.monotonic()

    def look(self) -> float:
        """Kill the workers that have been silent for too long, ping the others; seconds until the next turn."""
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
        self._kill(worker.pid, reason, local_rank=worker.local_rank)


def ping(worker: Worker, now: float) -> None:
    """Send ``worker`` a ping."""
    if not worker.pinged_at:
        worker.pinged_at, worker.queued = now, queued_s(worker.pid)
    with contextlib.suppress(ChannelClosedError):
        worker.connection.send(Ping())


def starved_s(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Seconds in which a process could do nothing between ``before`` and ``now`` (:func:`queued_s`): the longest wait
    of one of its threads for a CPU."""
    return max((now[each] - before[each] for each in now.keys() & before.keys()), default=0.0)


def queued_s(pid: int) -> Mapping[str, float]:
    """Seconds that each thread of ``pid`` was runnable without a CPU in its whole life; empty if the kernel does not
    count them (sched-stats.rst, /proc/PID/task/TID/schedstat)."""
    found = {}
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").iterdir():
            found[each.name] = int((each / "schedstat").read_text().split()[1]) / 1e9
    return found


def process_state(pid: int) -> str:
    """The kernel's state of a process: ``traced`` (by a debugger), ``stopped``, ``running``, ...; or ``unknown``."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if int(fields.get("TracerPid", "0")):
        return "traced"
    return fields.get("State", "unknown").strip().partition("(")[2].rstrip(")") or "unknown"
