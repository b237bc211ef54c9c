"""``elastic_trainer.launch``: runs a function in several processes of this machine, from a script or a notebook.

The function is sent by cloudpickle, so it may be defined in ``__main__`` or in a cell. torchrun starts each process: in
restart mode one torchrun restarts all on a failure; in place, each is a separate node, with an etcd started here.

*Runs in* the caller's thread. *Owns* the processes, the etcd and a directory of logs, which is kept after a failure.
*Fails by* ConfigError for invalid arguments, LaunchError when a process fails for good.
*Invariant*: no process is left, however the call ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle

from elastic_trainer.clock import pause
from elastic_trainer.errors import ConfigError, PermanentError
from elastic_trainer.local import agents
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.local.launched import CALL, ERROR, OUTPUT, RESULT
from elastic_trainer.local.ledger import FileTail, end_of, last_error
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import rendezvous_options
from elastic_trainer.variables import ENV_LOG_LEVEL

_POLL_S = 0.05
_ALL_THERE_S = "60"
"""How long the first round waits for processes that start together."""


class LaunchError(PermanentError):
    """A process failed more often than allowed; its traceback is a note of this error."""


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    recovery: str = RecoveryMode.RESTART,
    max_restarts: int = 3,
    rdzv_conf: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` in ``nprocs`` processes; returns its result in each, None if it did not return.

    ``recovery``: "restart" restarts all processes when one fails (without etcd); "in_place" needs a ``Session`` in
    ``fn``: the other processes continue and the failed one rejoins (starts an etcd here; needs the extra ``local``).
    ``max_restarts``: for all processes together; in place, for each. ``rdzv_conf``: options of the rendezvous, only in
    place. Prints the processes' output. Blocks until all have ended; an interrupt ends them.

    Raises ConfigError for invalid arguments, LaunchError when a process fails for good.
    """
    in_place = _checked(nprocs, recovery, rdzv_conf)
    agents.preload()
    directory = Path(tempfile.mkdtemp(prefix="elastic-trainer-launch-"))
    try:
        (directory / CALL).write_bytes(cloudpickle.dumps((fn, tuple(args))))
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise ConfigError(
            f"the function or its arguments cannot be sent to other processes: {error}",
            hint="open files, locks and connections inside the function",
        ) from error
    with ExitStack() as stack:
        endpoint = f"{HOST}:{free_ports(1)[0]}"
        if in_place:
            endpoint = stack.enter_context(EtcdServer(directory / "etcd")).endpoint
        nodes = nprocs if in_place else 1
        spec = ClusterSpec(
            run=f"launch-{secrets.token_hex(4)}",
            directory=directory,
            endpoint=endpoint,
            entry=("-m", "elastic_trainer.local.launched", str(directory)),
            min_nodes=1,
            max_nodes=nodes,
            workers=1 if in_place else nprocs,
            max_restarts=max_restarts,
            backend="etcd3" if in_place else "c10d",
            options={"recovery": "in_place", "last_call": _ALL_THERE_S, **(rdzv_conf or {})} if in_place else {},
            environment={
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                ENV_LOG_LEVEL: os.environ.get(ENV_LOG_LEVEL, "warning"),
            },
        )
        cluster = stack.enter_context(LocalCluster(spec))
        cluster.start(nodes)
        _follow(cluster, [FileTail(directory / OUTPUT.format(number)) for number in range(nprocs)])
        failed = [node for node in cluster.nodes if node.exit_code() != 0]
    if failed:
        raise _failure(directory, nprocs, failed[0])
    files = [directory / RESULT.format(number) for number in range(nprocs)]
    results = [cloudpickle.loads(file.read_bytes()) if file.exists() else None for file in files]
    shutil.rmtree(directory, ignore_errors=True)
    return results


def _checked(nprocs: int, recovery: str, rdzv_conf: Mapping[str, str] | None) -> bool:
    """Whether to recover in place. Raises ConfigError."""
    if nprocs < 1:
        raise ConfigError(f"nprocs is {nprocs}", hint="use 1 or more")
    if recovery not in tuple(RecoveryMode):
        raise ConfigError(f"recovery is {recovery!r}", hint=f"one of: {', '.join(RecoveryMode)}")
    if "RANK" in os.environ:
        raise ConfigError("launch() was called in a process that a launcher has started", hint="call it outside")
    if rdzv_conf and recovery != RecoveryMode.IN_PLACE:
        raise ConfigError("rdzv_conf needs recovery='in_place'", hint="omit it")
    rendezvous_options(dict(rdzv_conf or {}))
    return recovery == RecoveryMode.IN_PLACE


def _follow(cluster: LocalCluster, tails: Sequence[FileTail]) -> None:
    """Print the processes' output until all have ended."""
    ended = False
    while not ended:
        ended = not cluster.running
        for tail in tails:
            for line in tail.read():
                print(line, flush=True)  # also works with a notebook's own stdout
        if not ended:
            pause(_POLL_S)


def _failure(directory: Path, nprocs: int, node: Node) -> LaunchError:
    """The error of the first process that left a traceback, otherwise the best known reason."""
    for number in range(nprocs):
        file = directory / ERROR.format(number)
        if file.exists():
            text = file.read_text(errors="replace").rstrip()
            error = LaunchError(f"process {number} failed: {text.splitlines()[-1]}", hint=f"logs: {directory / 'logs'}")
            error.add_note(text)
            return error
    why = last_error(end_of(node.log)) or "a process was killed, or ended by itself"
    return LaunchError(why, hint=f"logs: {directory / 'logs'}")
