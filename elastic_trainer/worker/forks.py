"""Children that the script forks are no part of the training: the session belongs to the process that opened it.

A forked child inherits signal handlers and the wakeup descriptor, so its SIGTERM would reach the parent. It inherits
connections, so peers would not notice the parent's death while the child lives. And the destructors of the parent's
groups wait for threads that a child does not have.

*Runs in* the thread that forks: in the parent before and after, in the child before ``fork`` returns there.
*Owns* this process's fork hooks, for its life.
*Invariant*: signals to the child wait until this work is done, then act as in a process without a session.
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

_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DISOWN: list[Callable[[], None]] = []
"""Called in a child for each open session."""
_registered = threading.Event()


class _Mask(threading.local):
    """The signals that a thread had blocked before it began to fork; None otherwise."""

    before: set[Any] | None = None


_mask = _Mask()


def watch(disown: Callable[[], None]) -> None:
    """Call ``disown()`` first in each child from now on."""
    if not _registered.is_set():
        _registered.set()
        os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_begin)
    _DISOWN.append(disown)


def leave(disown: Callable[[], None]) -> None:
    """Stop doing that."""
    if disown in _DISOWN:
        _DISOWN.remove(disown)


def keep(value: object) -> None:
    """Never destroy ``value``, not even at interpreter exit."""
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
            gc.freeze()  # the child never collects the parent's objects
            keep(dist.group.WORLD)
        for disown in _DISOWN:
            disown()
        _DISOWN.clear()
    finally:
        _after()
