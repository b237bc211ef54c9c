"""Children that the script forks are no part of the training: the session belongs to the process that opened it.

A forked child has its parent's handlers and wakeup descriptor, so a SIGTERM to the child would be one to the parent.
It holds the parent's connections, so peers would not notice the parent's death while the child lives. Objects of the
parent's groups wait, when they are let go of, for threads that a child does not have.

*Runs in* the thread that forks: in the parent before and after, in the child before ``fork`` returns there.
*Owns* the hooks of this process, for its life. *Fails by* nothing.
*Invariant*: between the fork and the end of this work a signal to the child waits, then does what it does in a process
without a session.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_HELD_BACK = (signal.SIGTERM, signal.SIGINT)
_DISOWN: list[Callable[[], None]] = []
"""What a child does for each session that is open in this process."""
_registered = threading.Event()


class _Mask(threading.local):
    """The signals that a thread had blocked before it began to fork; None while it does not."""

    before: set[Any] | None = None


_mask = _Mask()


def watch(disown: Callable[[], None]) -> None:
    """From now on each child begins with ``disown()``."""
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_begin)
    _DISOWN.append(disown)


def leave(disown: Callable[[], None]) -> None:
    """No longer."""
    if disown in _DISOWN:
        _DISOWN.remove(disown)


def keep(value: object) -> None:
    """Never let go of ``value``, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _before() -> None:
    if _DISOWN:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)


def _after() -> None:
    before, _mask.before = _mask.before, None
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    try:
        if _DISOWN:
            gc.freeze()  # nothing of the parent's is ever collected here
            keep(dist.group.WORLD)
        for disown in _DISOWN:
            disown()
        _DISOWN.clear()
    finally:
        _after()
