"""The heartbeat page: one worker's status, in shared memory that its node's agent can read at any time.

It holds two records, each with a sequence number and a checksum: a *pulse* of fixed layout, written at every step and
change of phase, and *notes* (JSON), written on rare events (a save, a new rank). Each is written by one slice
assignment; a reader detects a half-written record by the checksum and reads again. (``struct.pack_into`` briefly shows
readers zeroes, and with a lock a dead worker could block its agent.) Three bytes outside the records hold the worker's
present activity: a single byte is always written whole, and costs almost nothing.

The stacks of a hung worker go to a file beside its page: the agent asks for them by a signal, and the worker's handler
in C writes them, even while the interpreter lock is held, but not while the process is stopped.

*Runs in* a worker's main thread (writes), and in the agent (reads).
*Owns* one file of 8 KiB that the worker creates and the agent removes; it outlives the worker, so no count is lost.
*Fails by* OSError from :meth:`PageWriter.create`; an unreadable page is None.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import xxhash

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.ipc.folders import take_room
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.families import RankGauges

PAGE_BYTES: Final = 8192
SAVE_SUFFIX: Final = ".save"
"""Suffix of the file by which the agent requests a save from the worker: it holds the id of the request."""
ORDER_SUFFIX: Final = ".order"
"""Of the file by which rank 0's agent has all ranks pause or restart: the order, and for a restart its round."""
PHASES: Final = tuple(Phase)
NUMBERS: Final[Mapping[Phase, int]] = {phase: number for number, phase in enumerate(PHASES)}
WORK: Final = (Phase.TRAINING, Phase.REPEATED, Phase.DATA)
_ATTEMPTS = 20

_MOMENT: Final = 0
"""Offset of the present phase; the next bytes say whether the worker waits for other ranks, and is inside a step."""
_PULSE_AT: Final = 64
_SUM: Final = struct.Struct("<Q")
_NOTES_AT: Final = 1024
_NOTES_HEAD: Final = struct.Struct("<QQ")
_LONGEST_NOTES: Final = PAGE_BYTES - _NOTES_AT - _NOTES_HEAD.size


@dataclass(slots=True)
class Heartbeat(RankGauges):
    """The values that change with every step. Times are on the machine's monotonic clock, which its processes share."""

    phase: Phase = Phase.STARTING
    world_size: int = 0
    round: int = 0
    steps: int = 0
    """Steps that this process has committed."""
    samples: int = 0
    """Samples that this process has trained on."""
    epoch: int = 0
    used: int = 0
    """The position of that state in the data: samples of ``epoch`` used by the whole job."""
    fresh: int = 0
    """Steps that it has committed since it joined its round."""
    nonfinite: int = 0
    allocated: int = 0
    reserved: int = 0
    """Memory of its device, in bytes."""
    phase_at: float = 0.0
    """When the present phase began."""
    moved_at: float = 0.0
    """When it last made progress."""
    stepped_wall: float = 0.0
    """When it committed its last step (Unix time); 0 before the first."""
    stepped_at: float = 0.0
    """The same on the monotonic clock."""
    loss: float = float("nan")
    save_interval_s: float = 0.0
    first_at: float = 0.0
    """When it committed the first step of its round (monotonic); 0 before that."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    """Seconds per phase, up to ``phase_at``."""


_CODES: Final = {"int": "q", "float": "d"}
_NAMES: Final = tuple(each.name for each in fields(Heartbeat) if each.type in _CODES)
"""The numbers of a pulse in order; before them come the sequence number and the phase, after them the seconds."""
_VALUES: Final = attrgetter(*_NAMES)
_PULSE: Final = struct.Struct(
    "<2Q" + "".join(_CODES[str(each.type)] for each in fields(Heartbeat) if each.type in _CODES) + f"{len(PHASES)}d"
)
_PULSE_SUM_AT: Final = _PULSE_AT + _PULSE.size
_PULSE_END: Final = _PULSE_SUM_AT + _SUM.size


@dataclass(frozen=True, slots=True)
class Reading:
    """The contents of a page when it was read. ``phase`` and ``waits`` are those of that moment."""

    path: Path
    pulse: Heartbeat
    phase: Phase
    waits: bool
    """Whether it waits for other ranks."""
    notes: Mapping[str, Any]
    inside: bool = False
    """Whether it is inside a step that it has not committed yet."""
    crash: str = ""
    """Its stacks, if a fatal signal ended it."""

    @property
    def pid(self) -> int:
        return int(self.notes.get("pid", 0))

    @property
    def born_at(self) -> float:
        """When its process started (monotonic)."""
        return float(self.notes.get("born_at", 0.0))

    @property
    def is_alive(self) -> bool:
        """Whether its process is alive, is not a zombie, and has not begun another page."""
        return not self.notes.get("closed") and start_of(self.pid) == self.notes.get("start")

    @property
    def local_rank(self) -> int:
        return int(self.notes.get("local_rank", 0))

    def seconds(self, now: float) -> dict[Phase, float]:
        """Seconds of the process's life by phase, up to monotonic time ``now``; steps only up to the last commit.

        The time of the present step is added when that is committed or given up, so no figure ever decreases.
        """
        spent = dict(zip(PHASES, self.pulse.seconds, strict=True))
        if self.pulse.phase not in WORK:
            spent[self.pulse.phase] += max(0.0, now - self.pulse.phase_at)
        return spent

    def last_seconds(self, died_at: float) -> dict[Phase, float]:
        """The same for a worker that died at ``died_at``: its present step is lost."""
        spent = self.seconds(died_at)
        if self.pulse.phase in WORK:
            spent[Phase.REPEATED] += max(0.0, died_at - self.pulse.phase_at)
        return spent

    def still_s(self, now: float) -> float:
        return max(0.0, now - self.pulse.moved_at)


def observed(name: str, value: float, buckets: tuple[float, ...]) -> dict[str, float]:
    """The counts by which the notes show ``value`` in the histogram ``name`` (its buckets are not cumulative)."""
    bound = next((each for each in buckets if value <= each), math.inf)
    return {f"{name}.le.{bound:g}": 1.0, f"{name}.sum": value, f"{name}.count": 1.0}


def start_of(pid: int | str) -> int | None:
    """When process ``pid`` started, in the kernel's ticks since boot; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class PageWriter:
    """Writes one worker's page; without ``path`` to private memory."""

    def __init__(self, memory: mmap.mmap | bytearray, path: Path | None = None) -> None:
        self.memory, self.path = memory, path
        self._sequence = 0

    @classmethod
    def create(cls, path: Path) -> PageWriter:
        """Create the file ``path``. Readers see it only when its first records are complete."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            take_room(descriptor, PAGE_BYTES)
            return cls(mmap.mmap(descriptor, PAGE_BYTES), path)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls) -> PageWriter:
        return cls(bytearray(PAGE_BYTES))

    def moment(self, phase: int) -> None:
        """Set the present phase (by number), valid until the next pulse or call."""
        self.memory[_MOMENT] = phase

    def set_waits(self, waits: bool) -> None:
        self.memory[_MOMENT + 1] = waits

    def set_in_call(self, inside: bool) -> None:
        self.memory[_MOMENT + 2] = inside

    def beat(self, pulse: Heartbeat, phase: int | None = None) -> None:
        """Write ``pulse``; pass ``phase``, the number of its phase, if known, which saves a look-up."""
        self._sequence += 1
        if phase is None:
            phase = NUMBERS[pulse.phase]
        record = _PULSE.pack(self._sequence, phase, *_VALUES(pulse), *pulse.seconds)
        self.memory[_PULSE_AT:_PULSE_END] = record + _SUM.pack(xxhash.xxh3_64_intdigest(record))

    def write_notes(self, notes: Mapping[str, Any]) -> None:
        """Write ``notes`` (JSON values, 7 KiB at most). ValueError if they are longer."""
        body = json.dumps(notes, separators=(",", ":")).encode()
        if len(body) > _LONGEST_NOTES:
            raise ValueError(f"the notes of a heartbeat page take {len(body)} bytes, the limit is {_LONGEST_NOTES}")
        head = _NOTES_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body))
        self.memory[_NOTES_AT : _NOTES_AT + len(head) + len(body)] = head + body


class PageReader:
    """Reads one worker's page repeatedly."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._take(mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ), path)

    @classmethod
    def of(cls, memory: mmap.mmap | bytearray) -> PageReader:
        reader = cls.__new__(cls)
        reader._take(memory, Path())
        return reader

    def _take(self, memory: mmap.mmap | bytearray, path: Path) -> None:
        self._memory, self.path = memory, path
        self._notes_head = b""
        self._notes: Mapping[str, Any] = {}

    def read(self) -> Reading | None:
        """The page as it is now; None before its first record, or if every attempt found a half-written record."""
        notes = self._read_notes()
        if notes is None:
            return None
        for _ in range(_ATTEMPTS):
            record = self._memory[_PULSE_AT:_PULSE_END]
            if _SUM.unpack_from(record, _PULSE.size)[0] == xxhash.xxh3_64_intdigest(record[: _PULSE.size]):
                pulse = _pulse(_PULSE.unpack_from(record))
                phase, waits, inside = self._memory[_MOMENT : _MOMENT + 3]
                now = PHASES[phase] if phase < len(PHASES) else pulse.phase
                return Reading(self.path, pulse, now, bool(waits), notes, bool(inside))
        return None

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            with contextlib.suppress(BufferError):
                self._memory.close()

    def _read_notes(self) -> Mapping[str, Any] | None:
        for _ in range(_ATTEMPTS):
            head = bytes(self._memory[_NOTES_AT : _NOTES_AT + _NOTES_HEAD.size])
            if head == self._notes_head:
                return self._notes
            length, checksum = _NOTES_HEAD.unpack(head)
            if not 0 < length <= _LONGEST_NOTES:
                continue
            begin = _NOTES_AT + _NOTES_HEAD.size
            body = self._memory[begin : begin + length]
            if xxhash.xxh3_64_intdigest(body) == checksum:
                self._notes_head, self._notes = head, json.loads(body)
                return self._notes
        return None


def _pulse(values: tuple[Any, ...]) -> Heartbeat:
    _, phase, *rest = values
    known = PHASES[phase] if phase < len(PHASES) else Phase.STARTING
    return Heartbeat(**dict(zip(_NAMES, rest, strict=False)), phase=known, seconds=rest[len(_NAMES) :])


SIGNAL: Final = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + 5
"""A signal that no other program uses: SIGUSR1 and SIGUSR2 belong to scripts and job controllers."""
CRASHES: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
"""What faulthandler handles."""
ANSWER_S: Final = 0.5
_QUIET_S: Final = 0.03
_SPY_S: Final = 3.0
_MOST: Final = 16_000
_MOST_OF_CRASH: Final = 256_000


def stacks_of(pid: int, page: Path) -> str:
    """The stacks of all threads of worker ``pid``, whose heartbeat page is ``page``; or why there are none."""
    written = _requested(pid, page.with_suffix(".stacks"))
    return (written or _py_spy(pid) or "none: the process is stopped or silent, and py-spy is not installed")[-_MOST:]


def _requested(pid: int, file: Path) -> str:
    try:
        before = file.stat().st_size
        handled, stopped = signal_state(pid)
        if stopped or SIGNAL not in handled:  # a signal without a handler would kill the process
            return ""
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    deadline, size = Deadline.after(ANSWER_S), before
    while not deadline.expired:
        pause(_QUIET_S)
        now = file.stat().st_size if file.exists() else before
        if now > before and now == size:
            break
        size = now
    with contextlib.suppress(OSError):
        return file.read_bytes()[before:].decode(errors="replace").strip()
    return ""


def crash_of(page: Path) -> str:
    """The stacks that a fatal signal had the worker of this page write; empty if it did not end by one."""
    try:
        _, fatal, written = page.with_suffix(".stacks").read_bytes().rpartition(b"Fatal Python error: ")
    except OSError:
        return ""
    return written[:_MOST_OF_CRASH].decode(errors="replace") if fatal else ""


def signal_state(pid: int) -> tuple[set[int], bool]:
    """The signals that process ``pid`` handles, and whether it is stopped (then it handles none)."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    mask = int(fields.get("SigCgt", "0"), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}, fields.get("State", "").strip()[:1] in "Tt"


def _py_spy(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=True).stdout.strip()
    return ""
