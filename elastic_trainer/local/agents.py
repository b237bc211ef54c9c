"""Starts the torchrun of a node: from a template, in a process that has asked for it, or by the interpreter.

*Runs in* any thread; what is started is started in one that lives as long as the process, since the leash of a node (it
ends when this process does) is tied to the thread. *Owns* the templates, one for each environment.
*Fails by* OSError. A node that a template cannot start is started by the interpreter.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic_trainer.warm.fitness import of_one_worker
from elastic_trainer.warm.starting import Cold, Starter, Wish

MODULES = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "elastic_trainer.agent.rendezvous.in_place",
    "elastic_trainer.worker.session",
)
"""What torchrun, this package's plugin and a worker with a Session import."""
_MOST = 3
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="node-spawner")
_free: list[str] = []
_starters: dict[frozenset[tuple[str, str]], Starter] = {}


def preload(free: Collection[str] = ()) -> None:
    """Start nodes from templates from now on; the variables ``free`` mean nothing to what is preloaded."""
    if not _free:
        _free[:] = ["", *free]
        atexit.register(_close)


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Run ``command`` until this process ends; its output is added to ``log``."""
    return _SPAWNER.submit(_spawn, command, log, environment).result()


def _spawn(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        try:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            wish = Wish(command, environment, *streams, leash=signal.SIGTERM, heir=True)
            return _starter(wish).start(wish)
        except Cold:
            leash = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid())]
            return subprocess.Popen(
                [*leash, *command],
                stdin=nothing,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the cluster's owner, who decides what it means
            )


def _starter(wish: Wish) -> Starter:
    if wish.words[0] != sys.executable:
        raise Cold("the node enters a network of its own first")
    common = {name: text for name, text in wish.environment.items() if not of_one_worker(name) and name not in _free}
    found = _starters.get(frozenset(common.items()))
    if found is None:
        if not _free or len(_starters) == _MOST:
            raise Cold("no template is wanted for this environment")
        found = _starters[frozenset(common.items())] = Starter(MODULES, (), common, learn=False, free=_free)
    return found


def _close() -> None:
    for each in _starters.values():
        each.close()
