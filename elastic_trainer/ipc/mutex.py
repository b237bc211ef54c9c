"""A mutex in shared memory that reports the death of its holder within a fraction of a millisecond.

When a process that uses torch is killed, the kernel releases its robust mutexes at once, but closes its sockets only
after tearing down its memory, tens of milliseconds later. POSIX: ``pthread_mutex_lock`` then returns EOWNERDEAD.

*Runs in* a worker (one thread holds the mutex for the life of the process) and in the agent (one thread waits for it).
*Owns* one page in a file of shared memory.
*Fails by* OSError if the disk is full or the C library has no robust mutexes; callers then rely on the closed socket.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from elastic_trainer.ipc.folders import take_room

_PAGE = 4096
_MUTEX_BYTES = 64  # sizeof(pthread_mutex_t) is 40 on x86-64 and 48 on aarch64; the page leaves room
_SHARED = 1
_ROBUST = 1


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class _Page:
    """The mutex's page, mapped."""

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if create:
                take_room(descriptor, _PAGE)
            self.memory = mmap.mmap(descriptor, _PAGE)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.pointer = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)))


class LifeMutex:
    """The holder's end: create it, and call :meth:`hold` in a thread that never ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = _library()
        self._page = _Page(path, create=True)
        attributes = ctypes.create_string_buffer(_MUTEX_BYTES)
        for result in (
            self._library.pthread_mutexattr_init(attributes),
            self._library.pthread_mutexattr_setpshared(attributes, _SHARED),
            self._library.pthread_mutexattr_setrobust(attributes, _ROBUST),
            self._library.pthread_mutex_init(self._page.pointer, attributes),
        ):
            if result:
                raise OSError(result, os.strerror(result))

    def hold(self) -> None:
        """Take the mutex in the calling thread; only the end of that thread releases it."""
        result = self._library.pthread_mutex_lock(self._page.pointer)
        if result:
            raise OSError(result, os.strerror(result))


def await_death(path: Path) -> bool:
    """Block until the holder of the mutex at ``path`` has died (True) or has released it (False).

    The call cannot be interrupted: make it in a daemon thread. The mutex must already be held. Removes the file, which
    nobody else needs: a later process may have the same number.
    """
    page = _Page(path, create=False)
    path.unlink(missing_ok=True)
    result = int(_library().pthread_mutex_lock(page.pointer))
    if result == 0:
        _library().pthread_mutex_unlock(page.pointer)
        return False
    if result == errno.EOWNERDEAD:
        return True
    raise OSError(result, os.strerror(result))
