"""Lets torchrun start its workers as forks of a template that has imported what they import.

torchrun starts each worker by ``SubprocessHandler._popen(args, env)``, which returns a Popen (torch 2.10 to 2.13): this
one method is replaced, in this process. All else stays torch's: redirected output, log prefixes, signals, exit codes.

*Runs in* torchrun's main thread. *Owns* the template's process, until this process ends.
*Fails by* nothing: a worker that cannot be forked is started as torchrun would have, and one event says why.
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
from elastic_trainer.settings import ENV_LEDGER_DIR
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.warm.fitness import OPTIONS, of_one_worker
from elastic_trainer.warm.starting import Cold, Starter, Wish

OFF, AUTOMATIC = "off", "auto"
"""Values of ``--rdzv-conf preload``; every other one names modules."""
_FIRST = ("torch",)
"""What every worker imports, before the first of them has shown more."""
_HOOK = ("self", "args", "env")
Start = Callable[[Any, tuple[str, ...], dict[str, str]], Popen[bytes]]


def install(preload: str) -> None:
    """Start this process's workers warm from now on, if torchrun can and ``preload`` asks for it."""
    if preload == OFF:
        return
    start: Start | None = getattr(SubprocessHandler, "_popen", None)
    if start is None or tuple(inspect.signature(start).parameters) != _HOOK or sys.platform != "linux":
        logger().info("template.refused", reason="this torch or this system starts workers in another way")
        return
    names = _FIRST if preload == AUTOMATIC else tuple(preload.split(":"))
    marks = (ENV_LEDGER_DIR,)  # of all processes of a local cluster
    environment = {name: value for name, value in os.environ.items() if name in marks or not of_one_worker(name)}
    try:
        starter = Starter(names, sorted(OPTIONS), environment, learn=preload == AUTOMATIC)
    except OSError as error:  # no process, descriptor or memory left, or no right to /dev/null
        logger().warning("template.refused", reason=str(error))
        return
    atexit.register(starter.close)
    handler: Any = SubprocessHandler
    handler._popen = warm(starter, start)


def warm(starter: Starter, cold: Start, clock: Clock = SYSTEM) -> Start:
    """What takes the place of torch's method ``cold``."""

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Popen[bytes]:
        began = clock.monotonic()
        stdout, stderr = (each.fileno() if each else number for number, each in ((1, self._stdout), (2, self._stderr)))
        try:
            worker = starter.start(Wish([str(word) for word in args], env, 0, stdout, stderr))
        except (Cold, OSError) as reason:
            logger().info("worker.started", warm=False, local_rank=self.local_rank_id, reason=str(reason))
            return cold(self, args, env)
        took_s = round(clock.monotonic() - began, 3)
        logger().info("worker.started", warm=True, local_rank=self.local_rank_id, pid=worker.pid, took_s=took_s)
        return worker

    return popen
