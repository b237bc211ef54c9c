"""The workers of this node as processes: finds them, and kills those that do not end with their round.

*Runs in* the agent: a thread named ``supervisor``. *Owns* no process; torchrun started them and reaps them.
*Invariant*: only children of this process that carry the run's id in their environment are ever signalled.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger


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


class Supervisor:
    """Ends workers of a round that is over and that ignore torchrun's SIGTERM.

    torchrun waits 30 s for them (a Python signal handler does not run while its thread is blocked in a collective);
    after ``grace_s`` nothing that they could still save is worth waiting for.
    """

    def __init__(self, run_id: str, grace_s: float, clock: Clock = SYSTEM) -> None:
        self._run_id, self._grace_s, self._clock = run_id, grace_s, clock
        self._over = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def round_over(self) -> None:
        """The round that the workers belong to is over: they have ``grace_s`` seconds from now."""
        self._over.set()

    def round_begun(self) -> None:
        """New workers are about to start (the old ones are gone: torchrun has said so by asking for a round)."""
        self._over.clear()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._over.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._clock.wait(self._over, 3600.0) or self._stop.is_set():
                continue
            self._clock.wait(self._stop, self._grace_s)
            while self._over.is_set() and not self._stop.is_set():
                self._kill()
                self._clock.wait(self._stop, 0.5)

    def _kill(self) -> None:
        for pid in worker_pids(self._run_id):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            logger().warning("worker.killed", pid=pid, reason=f"its round ended {self._grace_s:g} s ago")
