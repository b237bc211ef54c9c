"""``elastic_trainer.launch``: runs a function in several processes of this machine, from a script or a notebook.

The function is sent by cloudpickle, so it may be defined in ``__main__`` or in a cell. torchrun starts each process: in
restart mode one torchrun restarts all on a failure; in place, each is a separate node, with an etcd started here.

*Runs in* the caller's thread; as a program, in each of the processes.
*Owns* the processes, the etcd and a directory of logs, which is kept after a failure.
*Fails by* ConfigError for invalid arguments, LaunchError when a process fails for good.
*Invariant*: no process is left, however the call ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle

from elastic_trainer.clock import pause
from elastic_trainer.errors import EXIT_FAILURE, ConfigError, PermanentError
from elastic_trainer.local import agents
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.local.ledger import FileTail, end_of, last_error
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import rendezvous_options
from elastic_trainer.variables import ENV_LOG_LEVEL, ENV_NODE

CALL = "call"
"""The file with the function and its arguments."""
RESULT, ERROR, OUTPUT = "result-{}", "error-{}", "output-{}"
"""The files of a process, by its number: the function's result, the traceback of its last failure, its output."""
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
            entry=("-m", "elastic_trainer.local.launch", str(directory)),
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


# ---- in each process


def call(directory: Path) -> int:
    """In a process: call the function that ``directory`` holds; its output stays apart from torchrun's.

    Its exception is exit code 1, and the traceback in the output and in the directory.
    """
    node, local_rank = int(os.environ[ENV_NODE].removeprefix("n")), int(os.environ["LOCAL_RANK"])
    number = node * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    with (directory / OUTPUT.format(number)).open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        fn, args = cloudpickle.loads((directory / CALL).read_bytes())
        found = cloudpickle.dumps(fn(*args))
    except Exception as error:  # noqa: BLE001 - the edge to the function: printed once, without this module's frame
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(error.with_traceback(below)))
        (directory / ERROR.format(number)).write_text(text)
        print(text, end="", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    part = directory / f"part-{number}"
    part.write_bytes(found)
    part.replace(directory / RESULT.format(number))
    return 0


if __name__ == "__main__":
    sys.exit(call(Path(sys.argv[1])))
