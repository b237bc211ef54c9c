"""Makes torchrun start its workers as forks of a template process that has already imported their modules.

torchrun starts each worker by ``SubprocessHandler._popen(args, env)``, which returns a Popen (torch 2.10 to 2.13). Only
this method is replaced, in this process; output redirection, log prefixes, signals and exit codes remain torch's.

*Runs in* torchrun's main thread. *Owns* the template's process, until this process ends.
*Fails by* nothing: a worker that cannot be forked is started by torchrun's own method, and one event says why.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.warm.fitness import OPTIONS, of_one_worker
from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest

OFF, AUTOMATIC = "off", "auto"
"""Special values of ``--rdzv-conf preload``; any other value names modules."""
_FIRST = ("torch",)
"""The modules that every worker imports; preloaded before the first worker has shown which others it needs."""
_HOOK = ("self", "args", "env")
Start = Callable[[Any, tuple[str, ...], dict[str, str]], Popen[bytes]]
Await = Callable[[float], object]
"""Waits that many seconds at most until workers would start at once."""


def at_once(limit_s: float) -> None:
    """Workers start cold: there is nothing to wait for."""


def install(preload: str) -> Await:
    """From now on start this process's workers warm, if this torchrun supports it and ``preload`` enables it."""
    if preload == OFF:
        return at_once
    start: Start | None = getattr(SubprocessHandler, "_popen", None)
    if start is None or tuple(inspect.signature(start).parameters) != _HOOK or sys.platform != "linux":
        logger().info("template.refused", reason="this torch or this system starts workers in another way")
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
    handler: Any = SubprocessHandler
    handler._popen = warm(starter, start)
    return starter.await_imports


def warm(starter: Starter, cold: Start, clock: Clock = SYSTEM) -> Start:
    """Wraps torch's method ``cold``."""

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        began = clock.monotonic()
        stdout, stderr = (each.fileno() if each else number for number, each in ((1, self._stdout), (2, self._stderr)))
        try:
            worker = starter.start(StartRequest([str(word) for word in args], env, 0, stdout, stderr))
        except (ColdStart, OSError) as reason:
            logger().info("worker.started", warm=False, local_rank=self.local_rank_id, reason=str(reason))
            return cold(self, args, env)
        took_s = round(clock.monotonic() - began, 3)
        logger().info("worker.started", warm=True, local_rank=self.local_rank_id, pid=worker.pid, took_s=took_s)
        return worker

    return popen
