"""Ends the workers of an agent that was killed: they would hold GPUs, and write to their successors' files.

Workers with a ``Session`` notice by themselves. Others have no link to the agent, and torchrun sets no parent-death
signal. So a small process holds the other end of a pipe from the agent, and knows the workers' process ids.

*Runs in* torchrun's main thread (``install``), and in that process (``python orphan_reaper.py``), which imports the
standard library alone. *Owns* that process; an agent that exits waits for its end, so that no process is left behind.
*Fails by* nothing: if that process cannot start, workers start without it, and one event says why.
*Invariant*: a process that reuses a worker's process id is never signalled.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

BY_THEMSELVES_S = 5.0
"""Seconds that workers have to notice the agent's death before they get SIGTERM."""
_LOOK_S = 0.1
_VARIABLES = ("LD_LIBRARY_PATH",)
"""The variables that an interpreter may need to start; others, such as etcd's password, stay with the agent."""
Start = Callable[..., "subprocess.Popen[bytes]"]


class OrphanReaper:
    """The agent's end. Workers that outlive it get SIGTERM after ``notice_s`` seconds, SIGKILL ``grace_s`` later."""

    def __init__(self, grace_s: float, notice_s: float = BY_THEMSELVES_S) -> None:
        command = [sys.executable, "-E", "-S", __file__, str(notice_s), str(grace_s)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else a reader of the agent's output would see no EOF at its end
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """End the process group of the worker ``pid`` when this process ends."""
        stream: Any = self._process.stdin
        with suppress(OSError):  # the reaper was killed too
            stream.write(f"{pid} {_start_of(pid) or 'gone'}\n".encode())
            stream.flush()

    def close(self) -> None:
        """End the watched workers as if the agent had died, and wait until that is done."""
        stream: Any = self._process.stdin
        with suppress(OSError):
            stream.close()
        self._process.wait()


def install(grace_s: float) -> None:
    """From now on, workers that torchrun starts in this process end when it ends."""
    from elastic_trainer import torch_internals
    from elastic_trainer.telemetry.logs import logger

    lacking = torch_internals.lacking([torch_internals.ORPHANS])
    try:
        if lacking:
            raise OSError(lacking[0])
        reaper = OrphanReaper(grace_s)
    except OSError as error:
        logger().warning("reaper.refused", reason=str(error), effect="workers may outlive an agent that is killed")
        return
    atexit.register(reaper.close)
    torch_internals.replace_worker_start(watched(reaper, torch_internals.worker_start()))


def watched(reaper: OrphanReaper, start: Start) -> Start:
    """Wraps torch's method ``start``."""

    def popen(*arguments: Any) -> subprocess.Popen[bytes]:
        worker = start(*arguments)
        reaper.watch(worker.pid)
        return worker

    return popen


def main(notice_s: float, grace_s: float) -> None:
    """Wait for the agent to end, then end its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the agent, which this process outlives
    workers = [line.split() for line in sys.stdin]
    _await_end(workers, notice_s)
    _signal(workers, signal.SIGTERM)
    _await_end(workers, grace_s)
    _signal(workers, signal.SIGKILL)


def _await_end(workers: Iterable[list[str]], patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until and _living(workers):
        time.sleep(_LOOK_S)


def _signal(workers: Iterable[list[str]], number: signal.Signals) -> None:
    for pid in _living(workers):
        with suppress(OSError):
            os.killpg(pid, number)  # torchrun gives each worker a group of its own


def _living(workers: Iterable[list[str]]) -> list[int]:
    return [int(pid) for pid, start in workers if _start_of(pid) == start]


def _start_of(pid: int | str) -> str:
    """The start time of the process, as in ``ipc.page.start_of``; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
