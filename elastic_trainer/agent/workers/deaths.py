"""Why workers died: exit code or signal, last line of the exception, and whether the kernel killed them for memory.

*Runs in* torchrun's main thread. *Owns* the last count of OOM kills in this cgroup.
*Fails by* nothing: what the kernel or the worker did not write stays unknown.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.errors import LONGEST_LINE
from elastic_trainer.model import signal_name

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The file from which Kubernetes reads a container's termination message."""


class Deaths:
    """See the module. ``events`` counts the OOM kills in this process's cgroup, which are those of its workers."""

    def __init__(self, events: Path | None = None) -> None:
        self._events = events if events is not None else own_events()
        self._killed = self._kills()

    def describe(self, failures: Mapping[int, ProcessFailure], said: Mapping[int, str]) -> str:
        """Why the first failed worker died. ``said``: the last line of each exception, by process id."""
        if not failures:
            return ""
        rank, first = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
        before, self._killed = self._killed, self._kills()
        if first.exitcode < 0:
            how = f"was killed by {signal_name(-first.exitcode)}"
            if -first.exitcode == signal.SIGKILL and self._killed > before:
                how += ", because its cgroup was out of memory"
        else:
            how = f"ended with exit code {first.exitcode}"
        why = said.get(first.pid, "") or _recorded(first)
        return f"worker {first.local_rank} (rank {rank}) {how}" + (f": {why}" if why else "")

    def _kills(self) -> int:
        try:
            lines = self._events.read_text(encoding="ascii").splitlines()
            return int(dict(line.split() for line in lines).get("oom_kill", "0"))
        except (OSError, ValueError):
            return 0


def by_rank(failures: Mapping[int, ProcessFailure], ranks: Mapping[int, int]) -> dict[int, ProcessFailure]:
    """torchrun's ``failures`` by the rank that each worker had in its round (``ranks``, by process id), if known.

    In place torchrun takes each node for a world of its own, in which the first worker has rank 0.
    """
    return {ranks.get(each.pid, rank): each for rank, each in failures.items()}


def own_events(listed: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Path:
    """``memory.events`` of cgroup v2, else ``memory.oom_control`` of v1: both have a line ``oom_kill``.

    A v1 container reads its group's path on the host, but sees its own group mounted as the root.
    """
    try:
        lines = [line.split(":", 2) for line in listed.read_text(encoding="utf-8").splitlines()]
    except OSError:
        lines = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            own = root / "memory" / path.lstrip("/") / "memory.oom_control"
            return own if own.exists() else root / "memory" / "memory.oom_control"
    path = next((path for _, controllers, path in lines if not controllers), "")
    return root / path.lstrip("/") / "memory.events"


def _recorded(failure: ProcessFailure) -> str:
    """The error message of a script whose main() has torch's @record."""
    said: Any = failure.error_file_data.get("message")
    said = said.get("message") if isinstance(said, dict) else None
    return " ".join(said.split())[:LONGEST_LINE] if isinstance(said, str) else ""


def write_termination_message(reason: str, file: Path = TERMINATION_LOG) -> None:
    """Have Kubernetes show ``reason`` as the pod's termination message; elsewhere there is no such file."""
    try:
        if file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(reason.encode()[:4096])
    except OSError:
        pass
