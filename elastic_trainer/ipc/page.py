"""The heartbeat page: one worker's condition, in shared memory that its node's agent reads at any time.

Two records in one page of memory, each with a sequence number and a checksum: a *pulse* of fixed layout, written at
every step and change of phase, and *notes* (JSON), written on rare events (a save, a new place). Each is written by one
slice assignment; a reader notices a half-written record by the checksum and reads again. (``struct.pack_into`` shows
readers zeroes, and a dead worker could block its agent with a lock.) Three bytes outside the records say what the
worker does this moment: a single byte is always whole, and costs next to nothing.

*Runs in* a worker's main thread (writes), and in the agent (reads).
*Owns* one file of 8 KiB, made by the worker and removed by the agent; it outlives its worker, so that no count is lost.
*Fails by* OSError from :meth:`PageWriter.create`; an unreadable page is None.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import xxhash

from elastic_trainer.model import Phase
from elastic_trainer.telemetry.rank import RankGauges

PAGE_BYTES: Final = 8192
SAVE_SUFFIX: Final = ".save"
"""Of the file beside a page in which the agent asks the worker for a save: it holds the id of the request."""
PHASES: Final = tuple(Phase)
NUMBERS: Final[Mapping[Phase, int]] = {phase: number for number, phase in enumerate(PHASES)}
WORK: Final = (Phase.TRAINING, Phase.REPEATED, Phase.DATA)
_ATTEMPTS = 20

_MOMENT: Final = 0
"""Where the phase of this moment is, behind it whether the worker waits for other ranks, and whether a step is open."""
_PULSE_AT: Final = 64
_SUM: Final = struct.Struct("<Q")
_NOTES_AT: Final = 1024
_NOTES_HEAD: Final = struct.Struct("<QQ")
_LONGEST_NOTES: Final = PAGE_BYTES - _NOTES_AT - _NOTES_HEAD.size


@dataclass(slots=True)
class Heartbeat(RankGauges):
    """What changes with every step. Times are on the machine's monotonic clock, which all its processes share."""

    phase: Phase = Phase.STARTING
    world_size: int = 0
    round: int = 0
    steps: int = 0
    """Steps that this process has committed."""
    samples: int = 0
    """Samples that it has trained on."""
    epoch: int = 0
    used: int = 0
    """How far that state is in the data: samples of ``epoch`` used, job-wide."""
    fresh: int = 0
    """Steps that it has committed since it came into its round."""
    nonfinite: int = 0
    allocated: int = 0
    reserved: int = 0
    """Memory of its device, in bytes."""
    phase_at: float = 0.0
    """When the phase began."""
    moved_at: float = 0.0
    """When it last got on."""
    stepped_wall: float = 0.0
    """When it committed its last step (Unix time); 0 before the first."""
    loss: float = float("nan")
    save_interval_s: float = 0.0
    first_at: float = 0.0
    """When it committed the first step of its round (monotonic); 0 before."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    """Per phase, up to ``phase_at``."""


_CODES: Final = {"int": "q", "float": "d"}
_NAMES: Final = tuple(each.name for each in fields(Heartbeat) if each.type in _CODES)
"""The numbers of a pulse in their order; before them are its sequence number and phase, behind them the seconds."""
_VALUES: Final = attrgetter(*_NAMES)
_PULSE: Final = struct.Struct(
    "<2Q" + "".join(_CODES[str(each.type)] for each in fields(Heartbeat) if each.type in _CODES) + f"{len(PHASES)}d"
)
_PULSE_SUM_AT: Final = _PULSE_AT + _PULSE.size
_PULSE_END: Final = _PULSE_SUM_AT + _SUM.size


@dataclass(frozen=True, slots=True)
class Reading:
    """A page as it was when it was read. ``phase`` and ``waits`` are of that very moment."""

    path: Path
    pulse: Heartbeat
    phase: Phase
    waits: bool
    """Whether it waits for other ranks."""
    notes: Mapping[str, Any]
    inside: bool = False
    """Whether it is in a step that it has not committed yet."""

    @property
    def pid(self) -> int:
        return int(self.notes.get("pid", 0))

    @property
    def born_at(self) -> float:
        """When its process started (monotonic)."""
        return float(self.notes.get("born_at", 0.0))

    @property
    def lives(self) -> bool:
        """Whether its process is there, is no zombie, and has not begun another page."""
        return not self.notes.get("closed") and start_of(self.pid) == self.notes.get("start")

    @property
    def local_rank(self) -> int:
        return int(self.notes.get("local_rank", 0))

    def seconds(self, now: float) -> dict[Phase, float]:
        """Seconds of its life by phase, up to monotonic time ``now``; steps only up to the last commit.

        The time of the present step is added when it is committed or given up, so no figure ever decreases.
        """
        spent = dict(zip(PHASES, self.pulse.seconds, strict=True))
        if self.pulse.phase not in WORK:
            spent[self.pulse.phase] += max(0.0, now - self.pulse.phase_at)
        return spent

    def last_seconds(self, died_at: float) -> dict[Phase, float]:
        """The same of a worker that died at ``died_at``: the step that it was in is lost."""
        spent = self.seconds(died_at)
        if self.pulse.phase in WORK:
            spent[Phase.REPEATED] += max(0.0, died_at - self.pulse.phase_at)
        return spent

    def still_s(self, now: float) -> float:
        return max(0.0, now - self.pulse.moved_at)


def start_of(pid: int | str) -> int | None:
    """When process ``pid`` began, in the kernel's ticks since it booted; None if it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _take_room(descriptor: int) -> None:
    """Of a file with a hole, the first write into the mapping takes the room: where none is left, SIGBUS ends the
    process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, PAGE_BYTES)
    else:
        os.ftruncate(descriptor, PAGE_BYTES)


class PageWriter:
    """Writes one worker's page; without ``path`` into private memory."""

    def __init__(self, memory: mmap.mmap | bytearray, path: Path | None = None) -> None:
        self.memory, self.path = memory, path
        self._sequence = 0

    @classmethod
    def create(cls, path: Path) -> PageWriter:
        """Make the file ``path``. Readers know it only when its first records are whole."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _take_room(descriptor)
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
        """The phase (by number) from now until the next pulse or moment."""
        self.memory[_MOMENT] = phase

    def waits(self, waits: bool) -> None:
        self.memory[_MOMENT + 1] = waits

    def inside(self, inside: bool) -> None:
        self.memory[_MOMENT + 2] = inside

    def beat(self, pulse: Heartbeat, phase: int | None = None) -> None:
        """Write ``pulse``; pass ``phase``, the number of its phase, where it is known: the look-up takes time."""
        self._sequence += 1
        if phase is None:
            phase = NUMBERS[pulse.phase]
        record = _PULSE.pack(self._sequence, phase, *_VALUES(pulse), *pulse.seconds)
        self.memory[_PULSE_AT:_PULSE_END] = record + _SUM.pack(xxhash.xxh3_64_intdigest(record))

    def note(self, notes: Mapping[str, Any]) -> None:
        """Write ``notes`` (what JSON can hold, 7 KiB at most). ValueError if they are longer."""
        body = json.dumps(notes, separators=(",", ":")).encode()
        if len(body) > _LONGEST_NOTES:
            raise ValueError(f"the notes of a heartbeat page take {len(body)} bytes, {_LONGEST_NOTES} are there")
        head = _NOTES_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body))
        self.memory[_NOTES_AT : _NOTES_AT + len(head) + len(body)] = head + body


class PageReader:
    """Reads one worker's page, again and again."""

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
        """The page as it is now; None while it has not been begun, or if it was found torn each time."""
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
