"""Makes torchrun start its workers as forks of a template process that has already imported their modules.

torchrun starts each worker by one method, which returns a Popen. Only this method is replaced, in this process; output
redirection, log prefixes, signals and exit codes remain torch's.

*Runs in* torchrun's main thread. *Owns* the template's process, until this process ends.
*Fails by* nothing: a worker that cannot be forked is started by torchrun's own method, and one event says why.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from elastic_trainer import torch_internals
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest
from elastic_trainer.warm.template import OPTIONS, of_one_worker

OFF, AUTOMATIC = "off", "auto"
"""Special values of ``--rdzv-conf preload``; any other value names modules."""
_FIRST = ("torch",)
"""The modules that every worker imports; preloaded before the first worker has shown which others it needs."""
Start = torch_internals.WorkerStart
Await = Callable[[float], object]
"""Waits that many seconds at most until workers would start at once."""


def at_once(limit_s: float) -> None:
    """Workers start cold: there is nothing to wait for."""


def install(preload: str) -> Await:
    """From now on start this process's workers warm, if this torchrun supports it and ``preload`` enables it."""
    if preload == OFF:
        return at_once
    lacking = torch_internals.lacking([torch_internals.WARM_STARTS])
    if lacking or sys.platform != "linux":
        reason = lacking[0] if lacking else f"there is no template of processes on {sys.platform}"
        logger().warning("template.refused", reason=reason)
        return at_once
    names = _FIRST if preload == AUTOMATIC else tuple(preload.split(":"))
    marks = (ENV_LEDGER_DIR,)  # of all processes of a local cluster
    environment = {name: value for name, value in os.environ.items() if name in marks or not of_one_worker(name)}
    try:
        starter = Starter(names, sorted(OPTIONS), environment, learn=preload == AUTOMATIC)
    except OSError as error:  # out of processes, descriptors or memory, or no access to /dev/null
        logger().warning("template.refused", reason=str(error))
        return at_once
    atexit.register(starter.close)
    torch_internals.replace_worker_start(warm(starter, torch_internals.worker_start()))
    return starter.await_imports


def warm(starter: Starter, cold: Start, clock: Clock = SYSTEM) -> Start:
    """Wraps torch's method ``cold``."""

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        began = clock.monotonic()
        stdout, stderr = torch_internals.output_of(self)
        try:
            worker = starter.start(StartRequest([str(word) for word in args], env, 0, stdout, stderr))
        except (ColdStart, OSError) as reason:
            logger().info("worker.started", warm=False, local_rank=self.local_rank_id, reason=str(reason))
            return cold(self, args, env)
        took_s = round(clock.monotonic() - began, 3)
        logger().info("worker.started", warm=True, local_rank=self.local_rank_id, pid=worker.pid, took_s=took_s)
        return worker

    return popen
