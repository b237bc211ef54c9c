"""Commits a checkpoint atomically.

*Runs in* the saving process. *Owns* one temporary directory until its publication or removal.
*Fails by* StorageError; the temporary directory is removed and every other checkpoint is unchanged.
*Invariant*: whenever the process dies, each committed name holds a complete checkpoint. Data reach the disk before the
manifest, the manifest before the name, and a name never replaces another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from elastic_trainer.checkpoint.checking import CHUNK, Checksums, record
from elastic_trainer.checkpoint.faults import DamagedError
from elastic_trainer.checkpoint.image import FileImage, Image, from_bytes, pieces
from elastic_trainer.checkpoint.layout import MANIFEST_FILE, STATE_FILE, temporary_name
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest, seal
from elastic_trainer.checkpoint.storage import Sink, Storage
from elastic_trainer.checkpoint.writers import this_process
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import StorageError

_HEADROOM = 4 << 20
"""Required free space in addition to the files: for the manifest, directories and file system metadata."""


def commit(storage: Storage, image: Image, manifest: Manifest) -> Manifest:
    """Write ``image`` as the checkpoint ``manifest.name``; returns the manifest with the file records filled in.

    Raises DamagedError and commits nothing if the manifest already has records that the bytes no longer match; bytes of
    an ``image`` with checksums are not compared again (see FileImage).
    """
    require_space(storage, image.size)
    with temporary_entry(storage, manifest.name) as temporary:
        written = tuple(write_file(storage, temporary, file) for file in image.files)
        if manifest.files not in ((), written):
            raise changed(manifest)
        complete = manifest.with_files(written)
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, seal(complete)))
        storage.publish(temporary, manifest.name)
    return complete


def changed(manifest: Manifest) -> DamagedError:
    """The error for files whose bytes do not match the records of ``manifest``."""
    return DamagedError(f"checkpoint {manifest.name}: its bytes have changed in memory since they were copied")


def require_space(storage: Storage, size: int) -> None:
    """Raise StorageError unless ``size`` bytes of files fit."""
    free = storage.free_bytes()
    if free is not None and free < size + _HEADROOM:
        raise StorageError(
            f"checkpoint directory {storage.location} is full: the checkpoint needs {_shown(size + _HEADROOM)}, "
            f"{_shown(free)} are free",
            hint="free some space, or keep fewer checkpoints; earlier checkpoints are intact",
        )


def check_writable(storage: Storage) -> None:
    """Raise StorageError unless a checkpoint could be written now; leaves nothing behind and does not sync."""
    storage.prepare()
    require_space(storage, 0)
    with temporary_entry(storage) as temporary:
        write_file(storage, temporary, from_bytes(MANIFEST_FILE, b"\0" * 4096), durable=False)
        _discard(storage, temporary)


def check_speed(storage: Storage, size: int) -> tuple[float, float]:
    """Bytes per second of writing and reading ``storage``; leaves nothing behind. StorageError if not writable."""
    with temporary_entry(storage) as temporary:
        begun = SYSTEM.monotonic()
        write_file(storage, temporary, from_bytes(STATE_FILE, os.urandom(size)))
        written = SYSTEM.monotonic()
        source = storage.source(temporary, STATE_FILE)
        source.read_into(memoryview(bytearray(size)), 0)
        source.close()
        read = SYSTEM.monotonic()
        _discard(storage, temporary)
    return size / (written - begun), size / (read - written)


@contextmanager
def temporary_entry(storage: Storage, name: str | None = None) -> Iterator[str]:
    """A fresh entry, to become ``name``, which is removed if the block fails or is interrupted."""
    temporary = temporary_name(this_process())
    storage.create(temporary, name)
    try:
        yield temporary
    except BaseException:
        _discard(storage, temporary)
        raise


def _discard(storage: Storage, name: str) -> None:
    try:
        storage.remove(name)
    except OSError:
        return  # a broken disk, which the original error reports; the rest is swept after this process has ended


def write_file(storage: Storage, entry: str, file: FileImage, *, durable: bool = True) -> FileRecord:
    """Write ``file``; unless it has checksums, they are computed from the bytes that are passed to the kernel."""
    sink = storage.sink(entry, file.name)
    try:
        if file.head:
            sink.write(memoryview(file.head))
        if file.checksums:
            for piece in pieces(file.body(), CHUNK):
                sink.write(piece)
        else:
            file = _write_body(sink, file)
        sink.finish(durable=durable)
    finally:
        sink.abandon()
    return record(file)


def _write_body(sink: Sink, file: FileImage) -> FileImage:
    """Write one piece in a second thread while the next one is hashed; without the thread if the process is exiting."""
    sums = Checksums(file)
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-write") as writer:
        writing: Future[None] | None = None
        for piece in pieces(file.body(), CHUNK):
            sums.add(piece)
            if writing is not None:
                writing.result()
            try:
                writing = writer.submit(sink.write, piece)
            except RuntimeError:  # the interpreter shuts down: a leaving agent commits its snapshots
                sink.write(piece)
        if writing is not None:
            writing.result()
    return sums.taken()


def _shown(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
