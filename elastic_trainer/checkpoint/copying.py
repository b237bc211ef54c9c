"""Copy many pieces of memory into one, with several threads: one core alone does not use up the memory's speed.

*Runs in* the thread that saves, which stands still meanwhile, as its cores do, and in short-lived ones beside it.
*Fails by* what a copy raises, when all threads have ended.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_SLICE = 4 << 20
"""Bytes copied by one thread at a time."""
_WORTHWHILE = 32 << 20
"""Below that, starting a thread takes longer than what it saves."""
_MOST_THREADS = 4


class Parts:
    """What goes where in the array ``target`` of bytes."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._waiting: deque[tuple[int, Any]] = deque()
        self._size = 0

    def add(self, position: int, view: memoryview) -> None:
        """numpy copies as fast as memcpy, and lets other threads run meanwhile."""
        import numpy as np

        array = np.frombuffer(view, np.uint8)
        self._size += len(array)
        for start in range(0, len(array), _SLICE):
            self._waiting.append((position + start, array[start : start + _SLICE]))

    def copy(self) -> None:
        others = min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1
        if self._size < _WORTHWHILE or others < 1:
            self._run()
            return
        with ThreadPoolExecutor(others, thread_name_prefix="checkpoint-copy") as pool:
            helping = [pool.submit(self._run) for _ in range(others)]
            self._run()
        for each in helping:
            each.result()

    def _run(self) -> None:
        while self._waiting:
            try:
                position, array = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            self._target[position : position + len(array)] = array
