"""The worker processes of this node: finds them, and kills those that outlive their round.

*Runs in* the agent: a thread named ``supervisor``. *Owns* no process; torchrun starts and reaps them.
*Invariant*: only children of this process that carry the run's id in their environment are ever signalled.
"""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.agent.workers.kill import kill_now
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock

AGAIN_S = 0.5


def worker_pids(run_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Process ids of this process's workers of ``run_id`` (empty without /proc)."""
    wanted = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    found = []
    for task in (proc / "self" / "task").glob("*/children"):
        try:
            children = [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
        found += [pid for pid in children if _has_variable(proc / str(pid) / "environ", wanted)]
    return sorted(set(found))


def _has_variable(environ: Path, wanted: bytes) -> bool:
    try:
        return wanted in environ.read_bytes().split(b"\0")
    except OSError:
        return False


def kill_workers(run_id: str, reason: str) -> None:
    """SIGKILL this process's workers of ``run_id``."""
    for pid in worker_pids(run_id):
        kill_now(pid, reason)


class Supervisor:
    """Kills workers that ignore torchrun's SIGTERM after the end of their round.

    torchrun waits 30 s for them (a Python signal handler does not run while its thread is blocked in a collective);
    after ``grace_s`` nothing that they could still save is worth the wait.
    """

    def __init__(self, run_id: str, grace_s: float, clock: Clock = SYSTEM) -> None:
        self._run_id, self._grace_s, self._clock = run_id, grace_s, clock
        self._working_in = self._over = 0
        self._over_since = 0.0
        self._thread = PeriodicThread("supervisor", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def round_begun(self, number: int) -> None:
        """Workers are about to start in round ``number``; those of earlier rounds have ended."""
        self._working_in = number
        self._thread.wake()

    def round_over(self, number: int) -> None:
        """Rounds up to ``number`` are over: workers in one of them have ``grace_s`` seconds from now."""
        if number > self._over:
            self._over_since = self._clock.monotonic()  # first: a turn may come between the two
            self._over = number
            self._thread.wake()

    def close(self) -> None:
        self._thread.close()

    def turn(self) -> float:
        """Kill the workers whose grace period is over; seconds until the next look, since some may just be starting."""
        if not 0 < self._working_in <= self._over:
            return IDLE_S
        left_s = self._over_since + self._grace_s - self._clock.monotonic()
        if left_s > 0.0:
            return left_s
        kill_workers(self._run_id, f"its round ended {self._grace_s:g} s ago")
        return AGAIN_S
