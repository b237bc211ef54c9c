"""A checkpoint in parts, which several processes read and send to each other: reads and places single parts.

A part is a chunk with its own checksum, so the reader of one can verify it.

*Runs in* any reading process; :meth:`PartReader.read` in several threads at a time. *Owns* the files it opens.
*Fails by* DamagedError, GoneError or UnreadableError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from elastic_trainer.checkpoint.goals import Detour, FileRange
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest
from elastic_trainer.checkpoint.reading import (
    CheckpointFiles,
    Filling,
    cut,
    opened,
    read_chunk,
)
from elastic_trainer.checkpoint.storage import ByteSource


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One chunk of a file of tensors."""

    record: FileRecord
    index: int

    @property
    def begin(self) -> int:
        return self.record.bound(self.index)[0]

    @property
    def size(self) -> int:
        begin, end = self.record.bound(self.index)
        return end - begin


def parts_of(manifest: Manifest) -> tuple[CheckpointPart, ...]:
    """All data of all tensors, file by file and in their order."""
    return tuple(
        CheckpointPart(each, index) for each in manifest.tensor_files() for index in range(1, len(each.chunks))
    )


class PartReader:
    """Reads parts of the checkpoint of ``manifest`` in ``files``."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest) -> None:
        self._files, self._name = files, manifest.name
        self._sources: dict[str, ByteSource] = {}
        self._lock, self._opened = threading.Lock(), ExitStack()

    def read(self, part: CheckpointPart, into: memoryview) -> None:
        """Fill ``into`` with the verified bytes of ``part``."""
        read_chunk(self._source(part.record), self._name, part.record, part.index, lambda b, e: cut(into))

    def threads(self, part: CheckpointPart) -> int:
        """How many of them may read the file of ``part`` at a time with profit."""
        return self._source(part.record).readers

    def close(self) -> None:
        """When no thread reads any more."""
        self._opened.close()

    def _source(self, record: FileRecord) -> ByteSource:
        with self._lock:
            if record.name not in self._sources:
                found = self._opened.enter_context(opened(self._files, self._name, record))
                self._sources[record.name] = found
            return self._sources[record.name]


class Placing:
    """Copies the parts of a checkpoint, which arrive in order, to their destinations in ``filling``."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._files = {file.record.name: file for file in filling.files}
        self._landing: tuple[str, _Landing] | None = None
        """The file whose parts come now: those of a turn may need memory on the way."""

    def put(self, part: CheckpointPart, data: memoryview) -> None:
        name = part.record.name
        if self._landing is None or self._landing[0] != name:
            self._landing = name, _Landing(self._filling.reads(self._files[name]))
        self._landing[1].put(part.begin, data)


class _Landing:
    """One file of tensors."""

    def __init__(self, turns: Iterator[tuple[Sequence[FileRange], Sequence[Detour]]]) -> None:
        self._turns = turns
        self._segments, self._detours = self._turn()

    def _turn(self) -> tuple[Sequence[FileRange], Sequence[Detour]]:
        self._next = 0
        return next(self._turns, ((), ()))

    def put(self, begin: int, data: memoryview) -> None:
        end = begin + len(data)
        while self._next < len(self._segments):
            each = self._segments[self._next]
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                each.view[first - each.begin : last - each.begin] = data[first - begin : last - begin]
            if end < each.end:
                return
            self._next += 1
            if self._next == len(self._segments):
                for detour in self._detours:
                    detour.land()
                self._segments, self._detours = self._turn()
