"""Starts the torchrun of a node: from a template, in a process that has asked for it, or by the interpreter.

*Runs in* any thread; what is started is started in one that lives as long as the process, since the parent-death signal
of a node (it ends when this process does) is tied to the thread. *Owns* the templates, one for each of the last three
environments.
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
            network, words = _inside(command)
            wish = Wish(words, environment, *streams, death_signal=signal.SIGTERM, heir=True, network=network)
            return _starter(wish).start(wish)
        except Cold:
            tied = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid())]
            return subprocess.Popen(
                [*tied, *command],
                stdin=nothing,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the cluster's owner, who decides what it means
            )


def _inside(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The file of the network that ``command`` enters first (see ``local.namespaces``), and the rest."""
    if command[0] == "nsenter":
        return command[1].removeprefix("--net="), command[2:]
    return "", command


def _starter(wish: Wish) -> Starter:
    common = {name: text for name, text in wish.environment.items() if not of_one_worker(name) and name not in _free}
    if not _free:
        raise Cold("no template is wanted")
    key = frozenset(common.items())
    found = _starters.pop(key, None)
    if found is None:
        if len(_starters) == _MOST:
            _starters.pop(next(iter(_starters))).close()  # the one that was not needed for longest
        found = Starter(MODULES, (), common, learn=False, free=_free)
    _starters[key] = found
    return found


def _close() -> None:
    for each in _starters.values():
        each.close()
