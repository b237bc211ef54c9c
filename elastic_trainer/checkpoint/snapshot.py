"""A memory file with the files of one checkpoint and their description, which survives a killed process.

==========  ===========================================================================
bytes       content
==========  ===========================================================================
0 to 4095   the seal: ``_SEAL`` (magic, position, size and XXH3-128 of the notes)
4096 on     the checkpoint's files in the order of the manifest, each from a multiple of 4096 on
behind it   the notes: JSON with the checkpoint's location, its job, and its manifest
==========  ===========================================================================

*Runs in* the process that fills it (``break_seal``, ``seal``), in its successor and in the node's agent (``read``).
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
from typing import Any

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


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A state in the memory file ``descriptor``; the job ``job`` was to save it at ``location``."""

    descriptor: int
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
    def descriptors(self) -> frozenset[int]:
        """The memory files that hold it."""
        return frozenset(each.descriptor for each in self.parts or (self,))

    def _holder(self, file: str) -> StateSnapshot:
        return next((part for part in self.parts if file in part._names()), self)

    def _names(self) -> list[str]:
        return [each.name for each in self.manifest.files]

    def _file(self, record: FileRecord) -> FileImage:
        begin = self._begin(record.name)
        head = os.pread(self.descriptor, record.head_size, begin)
        if len(head) != record.head_size:
            raise DamagedError(f"snapshot {self.manifest.name}: {record.name} is cut off")
        start, end = begin + record.head_size, begin + record.size
        return FileImage(record.name, head, end - start, lambda: _pieces(self.descriptor, start, end))

    # ---- as the files that a reader opens

    def exists(self, name: str) -> bool:
        return name == self.manifest.name

    def source(self, name: str, file: str) -> SnapshotSource:
        holder = self._holder(file)
        return SnapshotSource(holder.descriptor, holder._begin(file), self.manifest.file(file).size)

    def _begin(self, file: str) -> int:
        begins = places([each.size for each in self.manifest.files])
        return begins[self._names().index(file)]


class SnapshotSource:
    """One file of a snapshot, read by position."""

    readers = 1

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor, self._begin, self.size = descriptor, begin, size

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """See :class:`~elastic_trainer.checkpoint.storage.ByteSource`."""
        position = self._begin + offset
        while buffer:
            count = os.preadv(self._descriptor, [buffer], position)
            if count == 0:
                return False
            position += count
            buffer = buffer[count:]
        return True

    def close(self) -> None:
        """The descriptor stays open."""


def whole(found: Iterable[StateSnapshot]) -> Iterator[StateSnapshot]:
    """The snapshots of ``found`` with a whole state; all places of a sharded state are merged into one snapshot."""
    groups: dict[Any, dict[int, StateSnapshot]] = {}
    for each in found:
        where = place_of(each._names())
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
    return StateSnapshot(first.descriptor, manifest, first.location, first.job, first.stored, parts)


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
    text = {"location": location, "job": job, "name": manifest.name, "manifest": seal(manifest).decode()}
    notes, begin = json.dumps(text).encode(), places([each.size for each in manifest.files])[-1]
    os.pwrite(descriptor, notes, begin)
    digest = xxhash.xxh3_128_digest(notes)
    os.pwrite(descriptor, _SEAL.pack(_MAGIC, begin, len(notes), digest, bytes(8)), 0)


def mark_stored(descriptor: int) -> None:
    """Mark the contents of the file as committed."""
    os.pwrite(descriptor, _STORED, _SEAL.size - len(_STORED))


def read(descriptor: int) -> StateSnapshot | None:
    """The snapshot in the file; None while it is incomplete. Its data are verified when they are read."""
    header = os.pread(descriptor, _SEAL.size, 0)
    if len(header) < _SEAL.size or not any(header):
        return None
    magic, begin, size, digest, mark = _SEAL.unpack(header)
    notes = os.pread(descriptor, size, begin) if magic == _MAGIC and size <= _LONGEST_NOTES else b""
    if not notes or xxhash.xxh3_128_digest(notes) != digest or mark not in (bytes(8), _STORED):
        if os.pread(descriptor, _SEAL.size, 0) != header:
            return None  # it is being filled
        raise DamagedError("a snapshot in memory is damaged: its seal does not match its notes")
    known = json.loads(notes)
    if parse_checkpoint(known["name"]) is None:
        raise DamagedError(f"a snapshot in memory has the name {known['name']!r}, which no checkpoint has")
    manifest = unseal(known["manifest"].encode(), known["name"])
    return StateSnapshot(descriptor, manifest, known["location"], known["job"], mark == _STORED)


def _pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    while start < end:
        piece = os.pread(descriptor, min(PIECE, end - start), start)
        if not piece:
            raise DamagedError("a snapshot in memory is cut off")
        yield memoryview(piece)
        start += len(piece)
