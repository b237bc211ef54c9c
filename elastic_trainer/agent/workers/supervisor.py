"""The workers of this node as processes: finds them, and kills those that do not end with their round.

*Runs in* the agent: a thread named ``supervisor``. *Owns* no process; torchrun started them and reaps them.
*Invariant*: only children of this process that carry the run's id in their environment are ever signalled.
"""

from __future__ import annotations

import threading
from pathlib import Path

from elastic_trainer.agent.workers.kill import kill_now
from elastic_trainer.clock import SYSTEM, Clock


def worker_pids(run_id: str, proc: Path = Path("/proc")) -> list[int]:
    """Process ids of this process's workers of ``run_id`` (empty where /proc does not tell)."""
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
    """Ends workers of a round that is over and that ignore torchrun's SIGTERM.

    torchrun waits 30 s for them (a Python signal handler does not run while its thread is blocked in a collective);
    after ``grace_s`` nothing that they could still save is worth waiting for.
    """

    def __init__(self, run_id: str, grace_s: float, clock: Clock = SYSTEM) -> None:
        self._run_id, self._grace_s, self._clock = run_id, grace_s, clock
        self._changed = threading.Condition()
        self._working_in = 0
        self._over = 0
        self._over_since = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def round_begun(self, number: int) -> None:
        """Workers are about to start in round ``number``; those of earlier rounds are gone."""
        with self._changed:
            self._working_in = number
            self._changed.notify()

    def round_over(self, number: int) -> None:
        """Rounds up to ``number`` are over: workers in one of them have ``grace_s`` seconds from now."""
        with self._changed:
            if number > self._over:
                self._over, self._over_since = number, self._clock.monotonic()
                self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left_s = self._over_since + self._grace_s - self._clock.monotonic()
                if not 0 < self._working_in <= self._over:
                    self._changed.wait()
                elif left_s > 0.0:
                    self._changed.wait(left_s)
                else:
                    kill_workers(self._run_id, f"its round ended {self._grace_s:g} s ago")
                    self._changed.wait(0.5)
