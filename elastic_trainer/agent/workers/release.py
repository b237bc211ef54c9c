"""Makes workers leave a round that is over: waits for busy ones, kills blocked ones.

The worker gets a message, shuts down its sockets and interrupts its waits. If it is still blocked (in a raw collective
of the script, or in a driver) only killing the process helps; torchrun then restarts it. A worker that saves, evaluates
or compiles is not blocked: :mod:`elastic_trainer.agent.health.node_health` bounds that time, and the record shows
the other nodes what they wait for.

*Runs in* the conductor, and in one timer of it for each worker that has to leave. *Owns* the timers.
*Fails by* nothing: a process that has already ended needs no kill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.agent.workers.conductor_config import ConductorPorts
from elastic_trainer.agent.workers.periodic import Cancellable, Later
from elastic_trainer.agent.workers.roster import Life, Worker
from elastic_trainer.agent.workers.watchdog import LATE, starved_s
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger

LONGEST_PAUSE_S: Final = 0.25
LOOKS_PER_LIMIT: Final = 8


@dataclass(slots=True)
class _Expected:
    """A worker of ``life`` that has to leave round ``number``; its time counts from ``blocked_at``."""

    life: Life
    worker: Worker
    number: int
    blocked_at: float
    looked_at: float
    timer: Cancellable | None = None
    queued: Mapping[str, float] = field(default_factory=dict)
    """What its threads had waited for a CPU at the first look."""


class Release:
    """See the module. ``sever_timeout_s``: minimum limit of a blocked worker; ``late()`` is called while one stays."""

    def __init__(
        self,
        sever_timeout_s: float,
        ports: ConductorPorts,
        late: Callable[[], None],
        call_later: Later,
        clock: Clock = SYSTEM,
    ) -> None:
        self._sever_timeout_s, self._ports, self._late = sever_timeout_s, ports, late
        self._later, self._clock = call_later, clock
        self._pause_s = min(LONGEST_PAUSE_S, sever_timeout_s / LOOKS_PER_LIMIT)
        self._expected: dict[int, _Expected] = {}

    def limit_s(self, worker: Worker) -> float:
        """Seconds that ``worker`` may take if it is not busy: at least two of its steps."""
        step_s = worker.ready.step_time_s if worker.ready is not None else 0.0
        return max(self._sever_timeout_s, 2.0 * step_s)

    def expect(self, life: Life, worker: Worker, number: int) -> None:
        """Round ``number`` is over: expect ``worker`` to report soon that it is free."""
        self.freed(worker)
        now = self._clock.monotonic()
        self._expected[worker.pid] = each = _Expected(life, worker, number, now, now)
        self._look_later(each)

    def freed(self, worker: Worker) -> None:
        """``worker`` is free, or has ended."""
        worker.busy = ""
        each = self._expected.pop(worker.pid, None)
        if each is not None and each.timer is not None:
            each.timer.cancel()

    def close(self) -> None:
        for each in list(self._expected.values()):
            self.freed(each.worker)

    def _look_later(self, each: _Expected) -> None:
        each.timer = self._later(self._pause_s, lambda: self._look(each))

    def _look(self, each: _Expected) -> None:
        worker = each.worker
        if self._expected.get(worker.pid) is not each:
            return
        if each.life.ended or worker.left is not None or not worker.stays_in(each.number):
            del self._expected[worker.pid]
            return
        now, busy, queued = self._clock.monotonic(), self._known(worker), self._ports.queued_s(worker.pid)
        stood_still = now - each.looked_at > LATE * self._pause_s
        each.looked_at = now
        if busy or stood_still or worker.unread:  # this agent was frozen, or has not read what the worker says
            each.blocked_at = now
        elif now - each.blocked_at > self.limit_s(worker) + starved_s(queued, each.queued):
            del self._expected[worker.pid]
            self._ports.kill(worker.pid, f"it did not leave round {each.number}, which is over")
            return
        each.queued = each.queued or queued
        self._note(worker, each.number, busy)
        self._look_later(each)

    def _known(self, worker: Worker) -> str:
        try:
            return self._ports.busy(worker.pid)
        except Exception:  # noqa: BLE001 - the edge of a thread: the worker must leave whatever a page contains
            logger().exception("page.unreadable", pid=worker.pid)
            return ""

    def _note(self, worker: Worker, number: int, busy: str) -> None:
        """Keep the last reason for its delay until it is free: it has had no time to leave since."""
        if busy and busy != worker.busy:
            worker.busy = busy
            logger().info("worker.awaited", pid=worker.pid, local_rank=worker.local_rank, over=number, busy=busy)
        self._late()
