"""A memory file with the files of one checkpoint and their description, which survives a killed process.

==========  ===========================================================================
bytes       content
==========  ===========================================================================
0 to 4095   the seal: ``_SEAL`` (magic, position, size and XXH3-128 of the notes)
4096 on     the checkpoint's files in the order of the manifest, each from a multiple of 4096 on
behind it   the notes: JSON with the checkpoint's location, its job, and its manifest
==========  ===========================================================================

*Runs in* the process that fills it (``break_seal``, ``seal_as``), in its successor and in the node's agent (``read``).
*Owns* nothing; the descriptor is the caller's.
*Fails by* DamagedError: the seal or the notes have changed since they were written.
*Invariant*: a file with a valid seal matches its manifest, unless a checksum of the manifest shows otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from elastic_trainer.checkpoint.faults import DamagedError
from elastic_trainer.checkpoint.image import PIECE, FileImage, Image
from elastic_trainer.checkpoint.layout import parse_checkpoint, place_of
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest, seal, unseal

DATA = 4096
"""Where the files begin."""
_MAGIC, _STORED = b"ELTSNAP1", b"COMMITED"
_SEAL = struct.Struct("<8sQQ16s8s")
_LONGEST_NOTES = 256 << 20


class SnapshotMemory(Protocol):
    """A memory file, of this machine or another one."""

    def read_into(self, buffer: memoryview, position: int) -> bool:
        """Fill ``buffer`` from ``position`` on; False if the file ends before. OSError if it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The memory file ``descriptor``."""

    descriptor: int

    def read_into(self, buffer: memoryview, position: int) -> bool:
        while buffer:
            count = os.preadv(self.descriptor, [buffer], position)
            if count == 0:
                return False
            position += count
            buffer = buffer[count:]
        return True


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A state in ``memory``; the job ``job`` was to save it at ``location``."""

    memory: SnapshotMemory
    manifest: Manifest
    location: str
    job: str | None
    stored: bool
    """Whether its process has committed it there."""
    parts: tuple[StateSnapshot, ...] = ()
    """For a sharded state: the snapshots of its places, whose files together are those of this one."""

    @property
    def order(self) -> tuple[int, int]:
        """Snapshots and checkpoints are ordered by this: the round and the step."""
        return self.manifest.round, self.manifest.step

    def image(self) -> Image:
        """Its files, read when they are written."""
        return Image(tuple(self._holder(record.name)._file(record) for record in self.manifest.files))

    @property
    def memories(self) -> frozenset[SnapshotMemory]:
        """The memory files that hold it."""
        return frozenset(each.memory for each in self.parts or (self,))

    @property
    def place(self) -> tuple[int, int] | None:
        """Whose part of a sharded state it is, and of how many; None for a whole state."""
        return place_of(self._names())

    def _holder(self, file: str) -> StateSnapshot:
        return next((part for part in self.parts if file in part._names()), self)

    def _names(self) -> list[str]:
        return [each.name for each in self.manifest.files]

    def _file(self, record: FileRecord) -> FileImage:
        begin = self._begin(record.name)
        head = bytearray(record.head_size)
        if not self.memory.read_into(memoryview(head), begin):
            raise DamagedError(f"snapshot {self.manifest.name}: {record.name} is cut off")
        start, end = begin + record.head_size, begin + record.size
        return FileImage(record.name, bytes(head), end - start, lambda: _pieces(self.memory, start, end))

    # ---- as the files that a reader opens

    def exists(self, name: str) -> bool:
        return name == self.manifest.name

    def source(self, name: str, file: str) -> SnapshotSource:
        holder = self._holder(file)
        return SnapshotSource(holder.memory, holder._begin(file), self.manifest.file(file).size)

    def _begin(self, file: str) -> int:
        begins = places([each.size for each in self.manifest.files])
        return begins[self._names().index(file)]


class SnapshotSource:
    """One file of a snapshot, read by position."""

    readers = 1

    def __init__(self, memory: SnapshotMemory, begin: int, size: int) -> None:
        self._memory, self._begin, self.size = memory, begin, size

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """See :class:`~elastic_trainer.checkpoint.storage.ByteSource`."""
        return self._memory.read_into(buffer, self._begin + offset)

    def close(self) -> None:
        """The memory stays open."""


def whole(found: Iterable[StateSnapshot]) -> Iterator[StateSnapshot]:
    """The snapshots of ``found`` with a whole state; all places of a sharded state are merged into one snapshot."""
    groups: dict[Any, dict[int, StateSnapshot]] = {}
    for each in found:
        where = each.place
        if where is None:
            yield each
            continue
        place, count = where
        parts = groups.setdefault((each.order, each.location, each.job, count), {})
        parts[place] = each
        if len(parts) == count:
            yield _joined(tuple(parts[number] for number in range(count)))


def _joined(parts: tuple[StateSnapshot, ...]) -> StateSnapshot:
    first = parts[0]
    manifest = first.manifest.with_files(tuple(record for part in parts for record in part.manifest.files))
    return StateSnapshot(first.memory, manifest, first.location, first.job, first.stored, parts)


def places(sizes: Sequence[int]) -> list[int]:
    """Where files of these ``sizes`` begin, and where the notes do.

    In a slot a file's data lie in pages as they will in the file, so that they can be written from there directly.
    """
    return list(itertools.accumulate((-(-size // DATA) * DATA for size in sizes), initial=DATA))


def break_seal(descriptor: int) -> None:
    """Invalidate the file before it is filled: it holds nothing until it is sealed again."""
    os.pwrite(descriptor, bytes(_SEAL.size), 0)


def seal_as(descriptor: int, manifest: Manifest, location: str, job: str | None) -> None:
    """Seal the file as holding the files of ``manifest``, whose records are filled in."""
    text, begin = notes(manifest, location, job), places([each.size for each in manifest.files])[-1]
    os.pwrite(descriptor, text, begin)
    digest = xxhash.xxh3_128_digest(text)
    os.pwrite(descriptor, _SEAL.pack(_MAGIC, begin, len(text), digest, bytes(8)), 0)


def mark_stored(descriptor: int) -> None:
    """Mark the contents of the file as committed."""
    os.pwrite(descriptor, _STORED, _SEAL.size - len(_STORED))


def read(descriptor: int) -> StateSnapshot | None:
    """The snapshot in the file; None while it is incomplete. Its data are verified when they are read."""
    header = os.pread(descriptor, _SEAL.size, 0)
    if len(header) < _SEAL.size or not any(header):
        return None
    magic, begin, size, digest, mark = _SEAL.unpack(header)
    text = os.pread(descriptor, size, begin) if magic == _MAGIC and size <= _LONGEST_NOTES else b""
    if not text or xxhash.xxh3_128_digest(text) != digest or mark not in (bytes(8), _STORED):
        if os.pread(descriptor, _SEAL.size, 0) != header:
            return None  # it is being filled
        raise DamagedError("a snapshot in memory is damaged: its seal does not match its notes")
    return described(LocalMemory(descriptor), text, stored=mark == _STORED)


def described(memory: SnapshotMemory, notes: bytes, *, stored: bool) -> StateSnapshot:
    """The snapshot in ``memory`` with these :func:`notes`."""
    known = json.loads(notes)
    if parse_checkpoint(known["name"]) is None:
        raise DamagedError(f"a snapshot in memory has the name {known['name']!r}, which no checkpoint has")
    manifest = unseal(known["manifest"].encode(), known["name"])
    return StateSnapshot(memory, manifest, known["location"], known["job"], stored)


def notes(manifest: Manifest, location: str, job: str | None) -> bytes:
    """The description of a snapshot with the files of ``manifest``."""
    text = {"location": location, "job": job, "name": manifest.name, "manifest": seal(manifest).decode()}
    return json.dumps(text).encode()


def extent(descriptor: int) -> tuple[bytes, int]:
    """The seal of a sealed file, and where its notes end."""
    header = os.pread(descriptor, _SEAL.size, 0)
    _, begin, size, _, _ = _SEAL.unpack(header)
    return header, begin + size


def reseal(descriptor: int, header: bytes, end: int) -> None:
    """Seal a copy of another file with its seal. ValueError unless that is one of a file which ends at ``end``."""
    magic, begin, size, _, _ = _SEAL.unpack(header[: _SEAL.size].ljust(_SEAL.size))
    if len(header) != _SEAL.size or magic != _MAGIC or begin + size != end:
        raise ValueError("a copy of a snapshot without its seal")
    os.pwrite(descriptor, header, 0)


def _pieces(memory: SnapshotMemory, start: int, end: int) -> Iterator[memoryview]:
    while start < end:
        piece = memoryview(bytearray(min(PIECE, end - start)))
        if not memory.read_into(piece, start):
            raise DamagedError("a snapshot in memory is cut off")
        yield piece
        start += len(piece)
