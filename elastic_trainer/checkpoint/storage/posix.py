"""Checkpoints in a directory of a local or network file system.

A buffered write costs the CPU a copy and a page for every 4 KB, concurrently with training; and a checkpoint that is
not read again evicts useful pages from the cache. So large writes go directly to the disk (O_DIRECT), from the caller's
memory if its address is aligned, otherwise through a small buffer.

*Runs in* any process that saves, loads or lists. *Owns* open files for the time of one call or one sink or source, and
the lock. *Fails by* what the port says.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic_trainer.checkpoint.manifest import OWNER_FILE
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, Sink
from elastic_trainer.errors import StorageError

# ---- the directory


_RETRIED_REMOVALS = 3
_LONGEST_WORDS = 4096

_EXPLANATIONS = {
    errno.ENOSPC: ("is full", "free some space, or keep fewer checkpoints"),
    errno.EDQUOT: ("is over its disk quota", "free some space, raise the quota, or keep fewer checkpoints"),
    errno.EROFS: ("is on a read-only file system", "choose another directory or mount it writable"),
    errno.EACCES: ("cannot be written: permission denied", "check its owner and mode"),
    errno.EPERM: ("cannot be written: operation not permitted", "check its owner and mode"),
    errno.ENOTDIR: ("is not a directory", "choose a directory"),
    errno.EEXIST: ("is not a directory", "choose a directory"),
    errno.EIO: ("reports an input/output error", "check the disk"),
}


@contextmanager
def writing(location: str) -> Iterator[None]:
    """Turns an OSError into a StorageError, one sentence about the directory ``location``."""
    try:
        yield
    except OSError as error:
        unknown = f"cannot be written: {error.strerror or error}", "check the directory"
        what, hint = _EXPLANATIONS.get(error.errno or 0, unknown)
        raise StorageError(f"checkpoint directory {location} {what}", hint=hint) from error


class PosixStorage:
    """A directory of a local or network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    @property
    def location(self) -> str:
        return str(self._root)

    def prepare(self) -> None:
        with writing(self.location):
            missing = [path for path in (self._root, *self._root.parents) if not path.exists()]
            self._root.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync(path.parent)

    def names(self) -> tuple[str, ...]:
        try:
            return tuple(os.listdir(self._root))
        except FileNotFoundError:
            return ()

    def exists(self, name: str) -> bool:
        return os.path.lexists(self._root / name)

    def free_bytes(self) -> int | None:
        with writing(self.location):
            status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def create(self, temporary: str, name: str | None = None) -> None:
        with writing(self.location):
            (self._root / temporary).mkdir()

    def sink(self, name: str, file: str) -> Sink:
        with writing(self.location):
            return PosixSink(self._root / name / file, self.location)

    def join(self, temporary: str, name: str) -> None:
        """It is a directory as any other."""

    def mark(self, temporary: str, file: str) -> bool:
        path = self._root / temporary / file
        with writing(self.location):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            except FileExistsError:
                return False
        return True

    def files(self, temporary: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._root / temporary))
        except FileNotFoundError:
            return frozenset()

    def discard(self, temporary: str, file: str) -> None:
        with writing(self.location):
            (self._root / temporary / file).unlink(missing_ok=True)

    def source(self, name: str, file: str) -> ByteSource:
        return PosixSource(self._root / name / file)

    def publish(self, temporary: str, name: str) -> None:
        if self.exists(name):
            raise StorageError(f"checkpoint directory {self.location} already has a {name}; it was not overwritten")
        with writing(self.location):
            sync(self._root / temporary)
            os.rename(self._root / temporary, self._root / name)
            sync(self._root)

    def rename(self, old: str, new: str) -> None:
        """rename(2) itself refuses to replace a directory that is not empty, and checkpoints never are."""
        if self.exists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(self._root / old, self._root / new)

    def remove(self, name: str) -> None:
        """Several processes may remove the same entry: each tolerates what the other has already done."""
        for attempt in range(_RETRIED_REMOVALS):
            try:
                shutil.rmtree(self._root / name)
                return
            except FileNotFoundError:
                if not self.exists(name):
                    return
                if attempt == _RETRIED_REMOVALS - 1:
                    raise

    def idle_s(self, name: str, reference: str) -> float:
        top = self._root / name
        touched = [top.stat().st_mtime, *(path.stat().st_mtime for path in top.iterdir())]
        return (self._root / reference).stat().st_mtime - max(touched)

    def hold(self, words: str, gives_way: Callable[[str], bool]) -> Holder | None:
        """A record lock goes with any descriptor of the file, so this one is the only one that is ever opened."""
        if self._lock is not None:
            if self._still_there(self._lock):
                return None
            self.let_go()
        with writing(self.location):
            descriptor = os.open(self._root / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if not _locked(descriptor):
                    return Holder(os.pread(descriptor, _LONGEST_WORDS, 0).decode(errors="replace"))
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, words.encode(), 0)
                self._lock, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        return None

    def _still_there(self, lock: int) -> bool:
        """Whether the locked file is the one that others would lock: the directory may have been removed."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self._root / OWNER_FILE))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # it cannot be looked at now; the save says why

    def let_go(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether the file is this process's now; also where the file system knows no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


# ---- its files


BLOCK = 4096
"""Addresses, positions and sizes of direct writes are multiples of it; no common disk has larger blocks."""
_BUFFER = 4 << 20
_READERS = 4
"""Beyond a few readers the memory bus or the disk is the limit."""
_KEPT_IN_CACHE = 1 << 20
"""Files up to this size may stay in the page cache: manifests, which are read again and again."""


class PosixSink:
    """A new file of the directory ``location``, to be written in order, synced and closed once."""

    def __init__(self, path: Path, location: str) -> None:
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._location = location
        self._written = self._filled = 0
        self._buffer: mmap.mmap | None = None
        self._direct: bool | None = None
        """None until there is enough to be written."""

    def write(self, data: memoryview) -> None:
        with writing(self._location):
            if self._direct is None and len(data) + self._filled >= BLOCK:
                self._direct = _set_direct(self._opened(), on=True)
            while data:
                data = data[self._take(data) :]

    def finish(self, *, durable: bool = True) -> None:
        with writing(self._location):
            self._write_rest()
            descriptor = self._opened()
            if durable:
                os.fsync(descriptor)
            if self._written > _KEPT_IN_CACHE:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._descriptor = None
            os.close(descriptor)

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
        return read_into(self._descriptor, buffer, offset)

    def close(self) -> None:
        os.close(self._descriptor)


def read_into(descriptor: int, buffer: memoryview, offset: int) -> bool:
    """Fill ``buffer`` from byte ``offset`` of the file on; False if it ends before."""
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            return False
        offset += count
        buffer = buffer[count:]
    return True


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
