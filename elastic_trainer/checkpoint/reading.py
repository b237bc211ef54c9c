"""Read a checkpoint without trust: every byte is checked against the manifest on its way into memory.

*Runs in* any reading process; short-lived threads read large files. *Owns* the files it opens.
*Fails by* DamagedError, GoneError or UnreadableError; nothing is changed on disk.
*Invariant*: each byte is read once, and used only after the checksum of its chunk was compared.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import xxhash

from elastic_trainer.checkpoint import codec, tensorfile, tensors
from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.image import PIECE
from elastic_trainer.checkpoint.layout import MANIFEST_FILE, STATE_FILE, TENSORS_FILE
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest, unseal
from elastic_trainer.checkpoint.storage import ByteSource

_THREADS = 4
"""Beyond a few readers the memory bus or the disk is the limit."""
_LONGEST_MANIFEST = 256 << 20

Buffers = Callable[[int, int], Iterator[memoryview]]
"""Where the bytes from a begin to an end of a file go, in order."""


class CheckpointFiles(Protocol):
    """Where the files of checkpoints are: a storage, or a snapshot in memory."""

    def exists(self, name: str) -> bool: ...

    def source(self, name: str, file: str) -> ByteSource: ...


def read_manifest(storage: CheckpointFiles, name: str) -> Manifest:
    """The verified manifest of the checkpoint ``name``."""
    with _found(storage, name, MANIFEST_FILE) as source:
        if source.size > _LONGEST_MANIFEST:
            raise DamagedError(f"checkpoint {name}: a manifest of {source.size} bytes cannot be one")
        content = bytearray(source.size)
        if not source.read_into(memoryview(content), 0):
            raise DamagedError(f"checkpoint {name}: {MANIFEST_FILE} is cut off")
    return unseal(bytes(content), name)


def read_state(storage: CheckpointFiles, manifest: Manifest) -> dict[str, Any]:
    """The state that the checkpoint of ``manifest`` holds; tensors are on the CPU."""
    skeleton = _read_whole(storage, manifest.name, manifest.file(STATE_FILE))
    loaded = _read_tensors(storage, manifest.name, manifest.file(TENSORS_FILE))
    return codec.decode(skeleton, loaded, f"checkpoint {manifest.name}")


def verify(storage: CheckpointFiles, manifest: Manifest) -> None:
    """Read every byte of the checkpoint of ``manifest`` and compare it; keeps nothing, needs no torch."""
    buffers = _reused_piece()
    for record in manifest.files:
        with _opened(storage, manifest.name, record) as source:
            for index in range(len(record.chunks)):
                _read_chunk(source, manifest.name, record, index, buffers)


def _reused_piece() -> Buffers:
    piece = memoryview(bytearray(PIECE))
    return lambda begin, end: (piece[: min(PIECE, end - start)] for start in range(begin, end, PIECE))


def _read_whole(storage: CheckpointFiles, name: str, record: FileRecord) -> bytearray:
    with _opened(storage, name, record) as source:
        content = bytearray(record.size)
        _read_chunks(source, name, record, range(len(record.chunks)), lambda b, e: _cut(memoryview(content)[b:e]))
    return content


def _read_tensors(storage: CheckpointFiles, name: str, record: FileRecord) -> dict[str, Any]:
    """First the header, which is a chunk of its own, then all data straight into the tensors' memory."""
    if record.head_size == 0:
        raise DamagedError(f"checkpoint {name}: {record.name} has no header of its own")
    with _opened(storage, name, record) as source:
        head = bytearray(record.head_size)
        _read_chunk(source, name, record, 0, lambda b, e: _cut(memoryview(head)[b:e]))
        data_size = record.size - record.head_size
        placed = tensorfile.parse(head, data_size, f"checkpoint {name}: {record.name}")
        if not placed:
            return {}
        slabs = tensors.allocate(placed)
        buffers = _slices(slabs, record.head_size)
        _read_chunks(source, name, record, range(1, len(record.chunks)), buffers)
    return tensors.build(placed, slabs)


def _slices(slabs: Sequence[tensors.Slab], data_start: int) -> Buffers:
    """The parts of ``slabs`` (which lie without gaps from ``data_start`` on in the file) between two positions."""

    starts = [data_start + slab.begin for slab in slabs]

    def buffers(begin: int, end: int) -> Iterator[memoryview]:
        index = bisect_right(starts, begin) - 1
        while index < len(slabs) and starts[index] < end:
            start = starts[index]
            yield from _cut(slabs[index].view[max(0, begin - start) : end - start])
            index += 1

    return buffers


def _cut(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def _read_chunks(source: ByteSource, name: str, record: FileRecord, chunks: Sequence[int], buffers: Buffers) -> None:
    """Read and compare ``chunks``, several at a time; the first problem ends it."""
    threads = min(_THREADS, len(chunks), os.cpu_count() or 1)
    if threads < 2:
        for index in chunks:
            _read_chunk(source, name, record, index, buffers)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")
    try:
        for done in [pool.submit(_read_chunk, source, name, record, index, buffers) for index in chunks]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read_chunk(source: ByteSource, name: str, record: FileRecord, index: int, buffers: Buffers) -> None:
    begin, end = record.bound(index)
    digest = xxhash.xxh3_128()
    position = begin
    for buffer in buffers(begin, end):
        try:
            complete = source.read_into(buffer, position)
        except OSError as error:
            raise _cannot_read(name, record.name, error) from error
        if not complete:
            raise DamagedError(f"checkpoint {name}: {record.name} is cut off within bytes {begin} to {end}")
        digest.update(buffer)
        position += len(buffer)
    if digest.hexdigest() != record.chunks[index]:
        raise DamagedError(f"checkpoint {name}: bytes {begin} to {end} of {record.name} do not match their checksum")


@contextmanager
def _opened(storage: CheckpointFiles, name: str, record: FileRecord) -> Iterator[ByteSource]:
    """The open file of ``record``, whose size is right."""
    with _found(storage, name, record.name) as source:
        if source.size != record.size:
            raise DamagedError(f"checkpoint {name}: {record.name} has {source.size} bytes; {record.size} were written")
        yield source


@contextmanager
def _found(storage: CheckpointFiles, name: str, file: str) -> Iterator[ByteSource]:
    """The open file; what is missing is told apart from what went away as a whole."""
    try:
        source = storage.source(name, file)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not storage.exists(name):
            raise GoneError(f"checkpoint {name} was removed meanwhile") from error
        raise DamagedError(f"checkpoint {name}: {file} is missing") from error
    except OSError as error:
        raise _cannot_read(name, file, error) from error
    try:
        yield source
    except OSError as error:
        raise _cannot_read(name, file, error) from error
    finally:
        source.close()


def _cannot_read(name: str, file: str, error: OSError) -> UnreadableError:
    return UnreadableError(
        f"checkpoint {name}: {file} cannot be read: {error.strerror or error}", hint="check its owner, mode and disk"
    )
