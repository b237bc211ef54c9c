"""Checkpoints in a directory of a local or network file system.

*Runs in* any process that saves, loads or lists. *Owns* open files for the time of one call or one sink or source, and
the lock. *Fails by* what the port says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.checkpoint.layout import OWNER_FILE
from elastic_trainer.checkpoint.storage.port import ByteSource, Holder, Sink
from elastic_trainer.checkpoint.storage.posix_io import PosixSink, PosixSource, sync
from elastic_trainer.errors import StorageError

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


def explain(error: OSError, location: str) -> StorageError:
    """``error`` in one sentence about the directory ``location``."""
    what, hint = _EXPLANATIONS.get(
        error.errno or 0, (f"cannot be written: {error.strerror or error}", "check the directory")
    )
    return StorageError(f"checkpoint directory {location} {what}", hint=hint)


class PosixStorage:
    """A directory of a local or network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    @property
    def location(self) -> str:
        return str(self._root)

    def prepare(self) -> None:
        with self._writing():
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
        with self._writing():
            status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def create(self, temporary: str, name: str | None = None) -> None:
        with self._writing():
            (self._root / temporary).mkdir()

    def sink(self, name: str, file: str) -> Sink:
        with self._writing():
            return PosixSink(self._root / name / file, lambda error: explain(error, self.location))

    def join(self, temporary: str, name: str) -> None:
        """It is a directory as any other."""

    def mark(self, temporary: str, file: str) -> bool:
        path = self._root / temporary / file
        with self._writing():
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
        with self._writing():
            (self._root / temporary / file).unlink(missing_ok=True)

    def source(self, name: str, file: str) -> ByteSource:
        return PosixSource(self._root / name / file)

    def publish(self, temporary: str, name: str) -> None:
        if self.exists(name):
            raise StorageError(f"checkpoint directory {self.location} already has a {name}; it was not overwritten")
        with self._writing():
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
        with self._writing():
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

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain(error, self.location) from error


def _locked(descriptor: int) -> bool:
    """Whether the file is this process's now; also where the file system knows no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
