"""Private folders of a living process: a lock marks the owner, and folders of killed owners are removed.

*Runs in* any thread of the owner. *Owns* one folder until ``close``. *Fails by* OSError if it cannot be created.
*Invariant*: a folder is never removed while its owner lives, nor one of another user. The kernel releases a lock when
its holder dies, in any namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class PrivateFolder:
    """A new folder in ``parent`` (None: the system's temporary folder) that only this user can enter.

    First removes folders of the same ``prefix`` whose owners are dead.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        root = parent if parent is not None else Path(tempfile.gettempdir())
        sweep(prefix, root)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            self._lock: int | None = _hold(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def take_room(descriptor: int, size: int) -> None:
    """Allocate the disk space of a file that is to be mapped. In a sparse file the first write to the mapping would
    allocate it, and on a full disk SIGBUS would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _hold(folder: Path) -> int:
    """Lock ``folder``; the lock file appears only once it is locked, or another process would remove the folder."""
    making = folder / "making"
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    making.rename(folder / "lock")
    return descriptor


def sweep(prefix: str, parent: Path) -> None:
    """Remove this user's folders that no process locks."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
