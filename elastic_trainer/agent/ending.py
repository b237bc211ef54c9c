"""Ends a worker process by force, and says why.

*Runs in* any thread of the agent. *Fails by* nothing: a process that is gone already is what was wanted.
"""

from __future__ import annotations

import os
import signal

from elastic_trainer.telemetry.logs import logger


def end_now(pid: int, reason: str, **more: int) -> None:
    """SIGKILL the worker ``pid``; ``more`` goes into the log."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    logger().warning("worker.killed", pid=pid, reason=reason, **more)
