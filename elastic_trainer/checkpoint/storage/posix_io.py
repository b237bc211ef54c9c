"""Files of a checkpoint on a POSIX file system: written past the page cache if possible, read by position.

A buffered write costs the CPU a copy and a page for every 4 KB, concurrently with training; and a checkpoint that is
not read again evicts useful pages from the cache. So large writes go directly to the disk (O_DIRECT), from the caller's
memory if its address is aligned, otherwise through a small buffer.

*Runs in* the thread that commits, or those that read. *Owns* one descriptor each.
*Fails by* StorageError for writes, OSError for reads.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic_trainer.errors import StorageError

BLOCK = 4096
"""Addresses, positions and sizes of direct writes are multiples of it; no common disk has larger blocks."""
_BUFFER = 4 << 20
_READERS = 4
"""Beyond a few readers the memory bus or the disk is the limit."""
_KEPT_IN_CACHE = 1 << 20
"""Files up to this size may stay in the page cache: manifests, which are read again and again."""


def beside(path: Path, *, folder: bool = False) -> Path:
    """A new, empty file or folder that is to replace ``path``; the umask decides who may read it. Raises OSError."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    if folder:
        made.mkdir()
    else:
        os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    return made


class PosixSink:
    """A new file, to be written in order, synced and closed once. ``explain`` makes an error of storage."""

    def __init__(self, path: Path, explain: Callable[[OSError], StorageError]) -> None:
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._explain = explain
        self._written = self._filled = 0
        self._buffer: mmap.mmap | None = None
        self._direct: bool | None = None
        """None until there is enough to be written."""

    def write(self, data: memoryview) -> None:
        try:
            if self._direct is None and len(data) + self._filled >= BLOCK:
                self._direct = _set_direct(self._opened(), on=True)
            while data:
                data = data[self._take(data) :]
        except OSError as error:
            raise self._explain(error) from error

    def finish(self, *, durable: bool = True) -> None:
        try:
            self._write_rest()
            descriptor = self._opened()
            if durable:
                os.fsync(descriptor)
            if self._written > _KEPT_IN_CACHE:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._descriptor = None
            os.close(descriptor)
        except OSError as error:
            raise self._explain(error) from error

    def abandon(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                os.close(descriptor)

    def _take(self, data: memoryview) -> int:
        """Write or keep a first part of ``data``; its size."""
        if self._direct is False:
            self._flush(self._filled)
            return self._put(data)
        gap = -self._filled % BLOCK
        if not self._filled and _fits(data, 0):
            return self._put(data[: len(data) // BLOCK * BLOCK])
        room = gap if gap and _fits(data, gap) else _BUFFER - self._filled
        taken = min(room, len(data))
        if self._buffer is None:
            self._buffer = mmap.mmap(-1, _BUFFER)
        self._buffer[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        if self._filled == _BUFFER or taken == gap:
            self._flush(self._filled)
        return taken

    def _flush(self, size: int) -> None:
        """Write the first ``size`` bytes of the buffer, which are all of it."""
        if self._buffer is not None:
            view, self._filled = memoryview(self._buffer)[:size], 0
            while view:
                view = view[self._put(view) :]

    def _write_rest(self) -> None:
        """The last part of a block cannot be written directly."""
        if self._direct:
            whole = self._filled // BLOCK * BLOCK
            rest = b"" if self._buffer is None else self._buffer[whole : self._filled]
            self._flush(whole)
            self._direct = _set_direct(self._opened(), on=False)
            view = memoryview(rest)
            while view:
                view = view[self._put(view) :]
        self._flush(self._filled)

    def _put(self, data: memoryview) -> int:
        try:
            count = os.write(self._opened(), data)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = _set_direct(self._opened(), on=False)  # the file system takes it back, or has larger blocks
            count = os.write(self._opened(), data)
        self._written += count
        if self._direct and count % BLOCK:
            self._direct = _set_direct(self._opened(), on=False)
        return count

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError("the file is closed")
        return self._descriptor


class PosixSource:
    """A descriptor read by position, so that threads need not share an offset."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size
        self.readers = min(_READERS, os.cpu_count() or 1)

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                return False
            offset += count
            buffer = buffer[count:]
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def sync(path: Path) -> None:
    """Wait until the disk has the file or directory ``path``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Whether writes go past the page cache from now on.

    Not where files have no block device of their own: memory and layered file systems refuse it, and over a network
    each write would wait for the server.
    """
    if on and os.major(os.fstat(descriptor).st_dev) == 0:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return on


def _fits(data: memoryview, start: int) -> bool:
    """Whether a whole block of ``data`` from ``start`` on can go to the disk from where it is."""
    if data.readonly or len(data) - start < BLOCK:
        return False
    return (ctypes.addressof(ctypes.c_char.from_buffer(data)) + start) % BLOCK == 0
