"""Why workers died, and which of their lives failed at startup: before they could have met those of other nodes.

Of a death: exit code or signal, the exception (its last line, types and place; of C++ the words alone, where error
output goes to a file), and whether the kernel killed for memory. A script that cannot start (a failing import, a wrong
argument) fails in the same way on every node, every time. A failure of one node alone is something else, so all members
of the round have to report the same failure twice (see ``membership.rules``); and once the ranks have met, any of them
may have caused the failure of another.

*Runs in* torchrun's main thread, and for a minute of each life in a thread named ``startup``. *Owns* that thread, the
last count of OOM kills in this cgroup, and how far torchrun's own output was read.
*Fails by* nothing: what the kernel or the worker did not write stays unknown; if the kernel does not show listening
sockets, a life counts as one whose workers have met others.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer import torch_internals
from elastic_trainer.agent.workers.conductor import FalseStart
from elastic_trainer.agent.workers.machine import end_of, last_lines, size_of, written_by
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import LONGEST_LINE
from elastic_trainer.membership.rules import alike
from elastic_trainer.model import line_of_script, place_of, signal_name

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The file from which Kubernetes reads a container's termination message."""
_NO_FILES: Final[Mapping[int, Path]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Death:
    """How one worker died. ``code``: its exit code, negative for a signal; ``memory``: the kernel killed for memory."""

    rank: int
    local_rank: int
    pid: int
    code: int
    memory: bool
    how: str
    """``ended with exit code 1: ValueError: ...``."""
    fault: Mapping[str, Any] = field(default_factory=dict)
    """What the traceback in torchrun's error file says, as a Session notes it of an exception."""

    @property
    def text(self) -> str:
        return f"worker {self.local_rank} (rank {self.rank}) {self.how}"


class Deaths:
    """See the module. ``events`` counts the OOM kills in this process's cgroup, which are those of its workers."""

    def __init__(self, events: Path | None = None, proc: Path = Path("/proc")) -> None:
        self._events = events if events is not None else own_events()
        self._killed, self._own = self._kills(), proc / "self"
        self._read_to = self._ends()

    def look(
        self, failures: Mapping[int, ProcessFailure], said: Mapping[int, str], errors: Mapping[int, Path] = _NO_FILES
    ) -> list[Death]:
        """How the failed workers died, the first one first.

        ``said``: the last line of each exception, by process id. ``errors``: the files that they have for error output,
        by local rank (torchrun's ``--redirects``, ``--tee``).
        """
        before, self._killed = self._killed, self._kills()
        found = []
        aborted = sum(each.exitcode == -signal.SIGABRT for each in failures.values())
        for rank, each in sorted(failures.items(), key=lambda item: (item[1].timestamp, item[0])):
            memory = -each.exitcode == signal.SIGKILL and self._killed > before
            if each.exitcode < 0:
                how = f"was killed by {signal_name(-each.exitcode)}"
                how += ", because its cgroup was out of memory" if memory else ""
            else:
                how = f"ended with exit code {each.exitcode}"
            own = errors.get(each.local_rank)
            recorded, trace = _recorded(each)
            why = said.get(each.pid, "") or self._aborted(each, own, alone=aborted == 1) or recorded
            if not why and each.exitcode > 0:
                why = _written(own)  # the last line says why it ended, but not why somebody ended it
            how += f": {' '.join(why.split())[:LONGEST_LINE]}" if why else ""
            found.append(Death(rank, each.local_rank, each.pid, each.exitcode, memory, how, traceback_fault(trace)))
        self._read_to = self._ends()
        return found

    def _ends(self) -> dict[Path, int]:
        """The files that torchrun writes to, and their present sizes."""
        return {path: size_of(path) for path in written_by(self._own)}

    def _aborted(self, failure: ProcessFailure, own: Path | None, *, alone: bool) -> str:
        """What ``std::terminate`` or the allocator of glibc wrote before it aborted the process.

        In a file that workers share only where it is clear whose words these are: one was aborted, and it says so once.
        """
        if failure.exitcode != -signal.SIGABRT:
            return ""
        shared = own is None
        read_to = self._read_to if own is None else {own: 0}
        found = [match for path, begin in read_to.items() for match in _ABORTED.finditer(end_of(path, begin))]
        if not found or (shared and (len(found) > 1 or not alone)):
            return ""
        kind, what, checked = found[-1].groups()
        return " ".join((checked or f"uncaught {kind}: {what or ''}").split())[:LONGEST_LINE]

    def _kills(self) -> int:
        try:
            lines = self._events.read_text(encoding="ascii").splitlines()
            return int(dict(line.split() for line in lines).get("oom_kill", "0"))
        except (OSError, ValueError):
            return 0


_ABORTED: Final = re.compile(
    r"^terminate called after throwing an instance of '([^'\n]+)'(?:\s*\n\s*what\(\):\s*([^\n]*))?"
    r"|^(double free or corruption[^\n]*|(?:free|malloc|realloc)\(\): [^\n]*|\*\*\* [^\n]*: terminated)",
    re.MULTILINE,
)
RESTARTED: Final = "an operator restarted its workers"


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


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """What a worker left in torchrun's error file, as ours and torch's @record do: message and traceback."""
    report: Any = failure.error_file_data.get("message")
    said = report.get("message") if isinstance(report, dict) else None
    more = report.get("extraInfo") if isinstance(report, dict) else None
    trace = more.get("py_callstack") if isinstance(more, dict) else None
    return said if isinstance(said, str) else "", trace if isinstance(trace, str) else ""


def _written(own: Path | None) -> str:
    """The last line of a worker's own error output."""
    return next(iter(last_lines(own, 1)), "") if own is not None else ""


_CAUSE: Final = "The above exception was the direct cause of the following exception:"
_CONTEXT: Final = "During handling of the above exception, another exception occurred:"
_FRAME: Final = re.compile(r'^  File "([^"\n]+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
_UNINDENTED: Final = re.compile(r"^\S.*$", re.MULTILINE)
_RAISED: Final = re.compile(r"([\w.<>]+)(?:: (.*))?")
_OF_COLLECTIVES: Final = re.compile(r"torch\.distributed\.(?:Dist\w*Error|QueueEmptyError)")
_LONGEST_TRACE, _LONGEST_TYPE, _MOST_TYPES = 256_000, 150, 6


def traceback_fault(text: str) -> dict[str, Any]:
    """What a Session would note of the exception with this traceback (``worker.comm.control.origin``).

    ``lost_peer``: it comes from a collective, which another rank has most likely ended. Empty if there is no traceback.
    """
    text = text[-_LONGEST_TRACE:]
    types, files, at, because = list[str](), list[str](), "", ""
    for part in reversed(text.rpartition(_CONTEXT)[2].split(_CAUSE)):
        if (raised := _raised(part)) is None:
            break
        kind, words = raised
        because = f"{kind.rpartition('.')[2]}: {words}"[:_LONGEST_TYPE] if types and words else because
        types.append(kind[:_LONGEST_TYPE])
        frames = [(match[1], match[2], match[3]) for match in _FRAME.finditer(part)][::-1]
        files = [file for file, _, _ in frames] + files
        at = line_of_script(frames) or at
    if not types:
        return {}
    # Also where a handler of it failed itself.
    every = [found for part in re.split(f"{_CAUSE}|{_CONTEXT}", text) if (found := _raised(part)) is not None]
    lost = any(_lost_peer(*each) for each in every)
    place, at = place_of(files), at[:LONGEST_LINE]
    return {"types": types[:_MOST_TYPES], "place": place, "at": at, "because": because, "lost_peer": lost}


def _raised(part: str) -> tuple[str, str] | None:
    """Type and words of the exception in one part of a traceback: the first line behind the last frame that is not
    indented, as the frame's code and marks are."""
    end = max((match.end() for match in _FRAME.finditer(part)), default=len(part))
    line = _UNINDENTED.search(part, end)
    found = _RAISED.fullmatch(line[0]) if line is not None else None
    return (found[1], found[2] or "") if found is not None else None


def _lost_peer(kind: str, words: str) -> bool:
    if _OF_COLLECTIVES.fullmatch(kind):
        return torch_internals.OWN_DEVICE.search(words) is None
    return kind == "RuntimeError" and torch_internals.IN_GLOO.search(words) is not None


def write_termination_message(reason: str, file: Path = TERMINATION_LOG) -> None:
    """Have Kubernetes show ``reason`` as the pod's termination message; elsewhere there is no such file."""
    try:
        if file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(reason.encode()[:4096])
    except OSError:
        pass


# ---- who listens: netlink (man 7 sock_diag) lists listening sockets in about 20 us; the tables below /proc/net, for
# kernels and sandboxes without it, walk all connections: some 10 ms, and more on machines with much memory

_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_LISTENING = 10
_HEADER, _SOCKET_ID_BYTES = struct.Struct("=IHHII"), 48
_ERROR, _LONGEST_ANSWER, _LIMIT_S = 2, 1 << 15, 5.0


def listened_at(port: int) -> bool:
    """Whether a process listens at ``port`` now, at any address of this process's network namespace."""
    try:
        return any(_answer(family, port) == _BY_FAMILY for family in (socket.AF_INET, socket.AF_INET6))
    except OSError:
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == f"{_LISTENING:02X}" for row in rows)


def _answer(family: int, port: int) -> int:
    """The type of the kernel's first message about sockets of ``family`` that listen at ``port``."""
    wanted = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _LISTENING) + struct.pack("!H", port)
    body = wanted.ljust(8 + _SOCKET_ID_BYTES, b"\0")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        answer = kernel.recv(_LONGEST_ANSWER)
    kind: int = _HEADER.unpack_from(answer)[1]
    if kind == _ERROR:
        raise OSError(-struct.unpack_from("=i", answer, _HEADER.size)[0], "sock_diag")
    return kind


# ---- lives that failed at their start

AT_START_S: Final = 60.0
"""A life that lasts longer has completed its startup."""
_LOOK_EVERY_S: Final = 0.05
_LONGEST: Final = 200


class StartupWatch:
    """See the module."""

    def __init__(self, clock: Clock = SYSTEM, listened: Callable[[int], bool] = listened_at) -> None:
        self._clock, self._listened = clock, listened
        self._began = clock.monotonic()
        self._got_past = False
        """Whether a life of this node did; then the script can start, whatever prevents that now."""
        self._last: FalseStart | None = None
        self._thread: PeriodicThread | None = None

    def begin(self, port: int | None) -> None:
        """The workers start; ``port``: where all ranks meet, if that is on this node."""
        self.close()
        self._began = self._clock.monotonic()
        if port is not None and not self._got_past:
            self._thread = PeriodicThread("startup", partial(self.turn, port), self._clock)
            self._thread.start()

    def end(self, failures: Mapping[int, ProcessFailure], *, stepped: bool) -> FalseStart | None:
        """The workers have ended, ``failures`` of them by themselves; ``stepped``: some have made a step."""
        self.close()
        self._got_past |= stepped or self.lasted_s >= AT_START_S
        what = described(failures)
        if self._got_past or not what:
            return None
        last = self._last if self._last is not None and alike({self._last.what, what}) else FalseStart("", 0)
        self._last = FalseStart(max(what, last.what, key=len), last.count + 1)
        return self._last

    @property
    def lasted_s(self) -> float:
        return self._clock.monotonic() - self._began

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def turn(self, port: int) -> float:
        """Note whether a socket listens at ``port`` now; returns the seconds until the next look."""
        if self._got_past or self.lasted_s >= AT_START_S:
            return IDLE_S
        try:
            self._got_past = self._listened(port)
        except OSError:
            self._got_past = True
        return _LOOK_EVERY_S


def described(failures: Mapping[int, ProcessFailure]) -> str:
    """How the workers failed (``membership.rules.alike`` compares it); "" if they did not fail by themselves."""
    if not failures or any(each.exitcode <= 0 for each in failures.values()):
        return ""
    first = failures[min(failures)]
    said, _ = _recorded(first)
    text = f"exit code {first.exitcode}" + (f": {said}" if said else "")
    return text.partition("\n")[0][:_LONGEST]
