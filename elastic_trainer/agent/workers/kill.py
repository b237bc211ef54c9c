"""Kills a worker process, and logs why and what it was doing.

*Runs in* any thread of the agent. *Fails by* nothing: a process that has already ended needs no kill.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.ipc.stacks import stacks_of
from elastic_trainer.telemetry.logs import logger


def kill_now(pid: int, reason: str, **more: int) -> bool:
    """SIGKILL the worker ``pid``; ``more`` is added to the log entry. False if it had already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    logger().warning("worker.killed", pid=pid, reason=reason, **more)
    return True


class HungWorkers:
    """The workers that were killed because they hung, and why: their node reports that cause instead of "lost".

    ``count()`` is called for each; ``page_of(pid)`` is the heartbeat page of a worker.
    """

    def __init__(
        self, count: Callable[[], None] = lambda: None, page_of: Callable[[int], Path | None] = lambda pid: None
    ) -> None:
        self._count, self._page_of = count, page_of
        self._lock = threading.Lock()
        self._reasons: dict[int, str] = {}

    def kill(self, pid: int, reason: str, *, local_rank: int) -> None:
        """Log the stacks of the hung worker ``pid`` and kill it, at most once."""
        with self._lock:
            if pid in self._reasons or not os.path.exists(f"/proc/{pid}"):
                return  # who read its page may be late: it has ended, and its reason was taken
            self._reasons[pid] = reason
        page = self._page_of(pid)
        if page is not None:
            logger().warning("worker.hung", pid=pid, reason=reason, stacks=stacks_of(pid, page), local_rank=local_rank)
        if kill_now(pid, reason, local_rank=local_rank):
            self._count()

    def take(self, pid: int) -> str | None:
        """Why ``pid``, which has ended, was killed; None if it was not. Forgets it: the kernel may reuse the id."""
        with self._lock:
            return self._reasons.pop(pid, None)

    def take_any(self) -> str | None:
        """The reason of any of them, once; for a restart of all workers of the node by torchrun."""
        with self._lock:
            reason = next(iter(self._reasons.values()), None)
            self._reasons.clear()
            return reason
