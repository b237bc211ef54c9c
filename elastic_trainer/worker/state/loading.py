"""All ranks read one checkpoint together, in parts, straight to their places: no rank holds a second copy of it.

Either one rank reads and passes each part on, or each rank that has the storage reads another part and passes that on.
Which is faster depends on the storage and the network: the first time both are tried, on a few parts each.

*Runs in* the worker's main thread of all ranks at once; threads read ahead. *Owns* the reader of this rank.
*Fails by* RoundBrokenError when a peer is gone. A part that cannot be read ends the load on all ranks.
*Invariant*: all ranks place the same parts in the same order, each one verified by the rank that read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from elastic_trainer.checkpoint.parts import CheckpointPart, PartReader, Placing
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import CheckpointError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.waits import ThreadedWork

FIELD = "loading"
"""The field of checkpoints that keeps how they are best loaded."""
MOST_READERS = 16
"""Each has a part in every rank's memory at the same time."""
_ROW = 4
"""Parts that one rank alone passes on at a time."""
_TRIAL = 2
"""Parts that each reader contributes to a trial, of which there are two: at most half of all parts, each."""


class Way(StrEnum):
    """Who reads."""

    ONE = "one"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class KnownWay:
    """Which ``way`` is best for that number of ``readers``."""

    way: Way
    readers: int

    @classmethod
    def kept(cls, fields: Mapping[str, Any], place: str) -> KnownWay | None:
        """What an earlier load from ``place`` has left in a checkpoint's ``fields``."""
        known = fields.get(FIELD)
        try:
            return cls(Way(known["way"]), int(known["readers"])) if known and known["place"] == place else None
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a load went. ``whole``: no rank had an error; ``error``: this rank's.

    ``one_s`` and ``all_s``: what equally many bytes took both ways, if they were compared.
    """

    whole: bool
    way: Way
    readers: int
    error: CheckpointError | None = None
    one_s: float = 0.0
    all_s: float = 0.0

    @property
    def values(self) -> Mapping[str, Any]:
        """For the log."""
        compared = {"one_s": round(self.one_s, 4), "all_s": round(self.all_s, 4)} if self.one_s else {}
        return {"way": str(self.way), "readers": self.readers, **compared}

    def field(self, place: str) -> Mapping[str, Any]:
        """What the next load from ``place`` can use."""
        known = {"way": str(self.way), "readers": self.readers, "place": place}
        return {FIELD: known} if self.one_s and self.all_s else {}


def kept(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What of ``fields`` belongs into the next checkpoint."""
    return {FIELD: fields[FIELD]} if FIELD in fields else {}


def trial_size(parts: int, readers: int) -> int:
    """How many of the ``parts`` to read in each way to see which is better; 0: it is not worth it. Pure."""
    return readers * min(_TRIAL, parts // (2 * readers)) if readers > 1 else 0


def load_together(
    control: Control,
    source: int,
    parts: Sequence[CheckpointPart],
    placing: Placing,
    reader: PartReader | None,
    known: KnownWay | None,
) -> Outcome:
    """All ranks get all ``parts``, of which rank ``source`` has a reader, and others may. ``known`` is alike on all."""
    rows = control.gather([int(reader is not None)])
    others = [rank for rank, (has,) in enumerate(rows) if has and rank != source]
    load = _Load(control, (source, *others)[:MOST_READERS], placing, _ReadAhead(control, reader))
    try:
        return _loaded(load, parts, known.way if known is not None and known.readers == len(load.readers) else None)
    finally:
        load.ahead.close()


def _loaded(load: _Load, parts: Sequence[CheckpointPart], way: Way | None) -> Outcome:
    size, one_s, all_s = trial_size(len(parts), len(load.readers)), 0.0, 0.0
    if way is None and size:
        spans = load.timed(parts[:size], Way.ALL), load.timed(parts[size : 2 * size], Way.ONE)
        all_s, one_s = (ns / 1e9 for ns in load.control.gather([int(1e9 * each) for each in spans])[load.readers[0]])
        parts, way = parts[2 * size :], Way.ALL if all_s < one_s else Way.ONE
    way = way or Way.ONE
    load.passed(parts, way)
    return Outcome(load.whole, way, len(load.readers), load.ahead.error, one_s, all_s)


class _Load:
    """See :func:`load_together`; the first of the ``readers`` is the source."""

    def __init__(self, control: Control, readers: Sequence[int], placing: Placing, ahead: _ReadAhead) -> None:
        self.control, self.readers, self._placing, self.ahead = control, readers, placing, ahead
        self.whole = True
        """Whether no rank has failed to read a part."""

    def timed(self, parts: Sequence[CheckpointPart], way: Way) -> float:
        began = SYSTEM.monotonic()
        self.passed(parts, way)
        return SYSTEM.monotonic() - began

    def passed(self, parts: Sequence[CheckpointPart], way: Way) -> None:
        """Read, give each other and place ``parts``, unless a rank cannot read one of its own."""
        among = self.readers if way is Way.ALL else self.readers[:1]
        owned = [(part, among[index % len(among)]) for index, part in enumerate(parts)]
        self.ahead.begin([part for part, owner in owned if owner == self.control.rank])
        width = len(among) if way is Way.ALL else _ROW
        for begin in range(0, len(owned), width):
            if self.whole:
                self._pass_on(owned[begin : begin + width])

    def _pass_on(self, row: Sequence[tuple[CheckpointPart, int]]) -> None:
        control, ahead = self.control, self.ahead
        held = [ahead.next() if owner == control.rank else ahead.buffer(part) for part, owner in row]
        self.whole = not any(failed for (failed,) in control.gather([int(ahead.error is not None)]))
        if not self.whole:
            return
        filled = [buffer[: part.size] for buffer, (part, _) in zip(held, row, strict=True)]
        control.broadcast_all([(each, owner) for each, (_, owner) in zip(filled, row, strict=True)])
        for each, (part, _) in zip(filled, row, strict=True):
            self._placing.put(part, each.numpy().data)
        ahead.free += held


class _ReadAhead:
    """The parts that this rank reads, in threads, before their turn comes."""

    def __init__(self, control: Control, reader: PartReader | None) -> None:
        self._works, self._reader = control.works, reader
        self._waiting: deque[CheckpointPart] = deque()
        self._running: deque[tuple[ThreadedWork, torch.Tensor]] = deque()
        self._most = 2
        self.free: list[torch.Tensor] = []
        self.error: CheckpointError | None = None
        """Of the first part that could not be read; what comes after it is not read."""

    def begin(self, parts: Sequence[CheckpointPart]) -> None:
        self._waiting.extend(parts)
        self._start()

    def next(self) -> torch.Tensor:
        """The next part; if there is an error, what it holds has no meaning."""
        self._start()
        reading, buffer = self._running.popleft()
        self._works.wait_for_own(reading)
        self.error = self.error or reading.result
        self._start()
        return buffer

    def buffer(self, part: CheckpointPart) -> torch.Tensor:
        """Memory for one part, which may have been used before."""
        fitting = next((each for each in self.free if len(each) >= part.size), None)
        if fitting is None:
            return torch.empty(part.record.chunk_size, dtype=torch.uint8)
        self.free = [each for each in self.free if each is not fitting]
        return fitting

    def close(self) -> None:
        """Whatever is still being read."""
        reader, running = self._reader, [reading for reading, _ in self._running]
        if reader is None:
            return
        if not running:
            reader.close()
            return

        def ended() -> None:
            for reading in running:
                reading.wait()
            reader.close()

        ThreadedWork(ended)

    def _start(self) -> None:
        while self._reader is not None and self._waiting and len(self._running) < self._most:
            part = self._waiting.popleft()
            buffer = self.buffer(part)
            self._running.append((ThreadedWork(partial(self._read, self._reader, part, buffer[: part.size])), buffer))

    def _read(self, reader: PartReader, part: CheckpointPart, into: torch.Tensor) -> CheckpointError | None:
        if self.error is not None:
            return self.error
        try:
            self._most = max(2, reader.threads(part))
            reader.read(part, into.numpy().data)
        except CheckpointError as error:
            return error
        return None
