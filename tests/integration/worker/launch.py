"""Starts training scripts alone, under torchrun and by hand, and ends what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from elastic_trainer.local.hosts import free_ports
from tests.support.forked import Forked

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 150.0


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, for small processes."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        ours.pop(name, None)
    return {**ours, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **extra}


def free_port() -> int:
    """A port that nobody listens on now, and that is given to no client before the script has begun to listen."""
    return free_ports(1)[0]


def plain(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]


def torchrun(options: Sequence[str], script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPTS / script), *map(str, arguments)]


def standalone(workers: int, script: str, *arguments: object, restarts: int = 0) -> list[str]:
    return torchrun(["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"], script, *arguments)


Started = subprocess.Popen[bytes] | Forked


@contextmanager
def started(command: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> Iterator[Started]:
    """The running ``command``; it and its descendants are killed in the end."""
    env = environment(**(extra or {}))
    process: Started
    if command[0] == sys.executable:
        process = Forked(command[1:], env, log, log)
    else:
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    try:
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def finished(process: Started, log: Path, limit_s: float = LIMIT_S) -> int:
    """The exit code, once it has ended; fails with its output if it does not."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.send_signal(signal.SIGABRT)  # faulthandler writes all stacks
        raise AssertionError(f"still running after {limit_s} s:\n{tail(log)}") from None


def run(
    command: Sequence[str],
    log: Path,
    extra: Mapping[str, str] | None = None,
    *,
    expected: int = 0,
    limit_s: float = LIMIT_S,
) -> None:
    """Run ``command`` to its end, which must be ``expected``."""
    with started(command, log, extra) as process:
        code = finished(process, log, limit_s)
    assert code == expected, f"exit code {code}, not {expected}:\n{tail(log)}"


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all its descendants."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
