"""Starts the torchrun of a node: from a template if this process has enabled that, otherwise by the interpreter.

*Runs in* any thread; it starts nodes in one thread that lives as long as the process, since a node's parent-death
signal is tied to the thread that started it. *Owns* the templates, one for each of the last three environments.
*Fails by* OSError. If a template cannot start a node, the interpreter does.
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

from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest
from elastic_trainer.warm.template import next_child_on, of_one_worker

MODULES = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "elastic_trainer.agent.rendezvous.in_place",
    "elastic_trainer.worker.session",
)
"""The modules that torchrun, this package's plugin and a worker with a Session import."""
_MOST = 3
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="node-spawner")
_free: list[str] = []
_starters: dict[frozenset[tuple[str, str]], Starter] = {}


def preload(free: Collection[str] = ()) -> None:
    """Start nodes from templates from now on; the variables ``free`` do not affect the preloaded modules."""
    if not _free:
        _free[:] = ["", *free]
        atexit.register(_close)


def spawn(command: Sequence[str], log: Path, environment: Mapping[str, str], host: int = 0) -> subprocess.Popen[bytes]:
    """Run ``command``, at most until this process ends; appends its output to ``log``.

    ``host``: the first process of the host that it runs on (see hosts.py), 0 for this process's own.
    """
    return _SPAWNER.submit(_spawn, command, log, environment, host).result()


def _spawn(command: Sequence[str], log: Path, environment: Mapping[str, str], host: int) -> subprocess.Popen[bytes]:
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        try:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            request = StartRequest(
                command, environment, *streams, death_signal=signal.SIGTERM, own_template=True, host=host
            )
            return _starter(request).start(request)
        except ColdStart:
            tied = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid()), str(host)]
            with next_child_on(host):
                return subprocess.Popen(
                    [*tied, *command],
                    stdin=nothing,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # the cluster's owner handles Ctrl-C
                )


def _starter(request: StartRequest) -> Starter:
    common = {name: text for name, text in request.environment.items() if not of_one_worker(name) and name not in _free}
    if not _free:
        raise ColdStart("no template is wanted")
    key = frozenset(common.items())
    found = _starters.pop(key, None)
    if found is None:
        if len(_starters) == _MOST:
            _starters.pop(next(iter(_starters))).close()  # the least recently used one
        found = Starter(MODULES, (), common, learn=False, free=_free)
    _starters[key] = found
    return found


def _close() -> None:
    for each in _starters.values():
        each.close()
