"""Copies many pieces of memory into one, with several threads: one core cannot use the whole memory bandwidth.

Pieces on a CUDA device are queued on the training stream: later writes to them, by an update or a script, come after
the copy in stream order, and the saving thread does not wait.

*Runs in* the saving thread, which blocks meanwhile and leaves its cores idle, and in short-lived threads.
*Fails by* a copy's error, after all threads have ended.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_trainer.checkpoint.image import OnDevice

_SLICE = 4 << 20
"""Bytes that one thread copies at a time."""
_WORTHWHILE = 32 << 20
"""Below this size, starting a thread costs more than it saves."""
_MOST_THREADS = 4
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of this process."""


class Cuda:
    """The calls of CUDA that copies take, written to torch's documentation: no test of this project has run them."""

    def pin(self, memory: Any) -> bool:
        """Pin the array ``memory``, so that a device can write to it directly; False if refused."""
        return int(_runtime().cudaHostRegister(memory.ctypes.data, len(memory), _PORTABLE)) == 0

    def unpin(self, memory: Any) -> None:
        """Unpin the array; no device may write to it any more."""
        import torch

        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(memory.ctypes.data)

    def queue(self, target: Any, data: Any) -> None:
        """Copy the tensor ``data`` into the array ``target`` after all earlier work of its device."""
        import torch

        torch.from_numpy(target).copy_(data, non_blocking=True)

    def mark(self, devices: Iterable[Any]) -> Callable[[], None]:
        """Returns a function that waits, in any thread, until all work queued on ``devices`` is done."""
        import torch

        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for each in events:
                each.synchronize()

        return wait


def _runtime() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Parts:
    """The pieces to copy, and their positions in the byte array ``target``."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._on_device: list[tuple[int, OnDevice]] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._size = 0

    @property
    def on_device(self) -> bool:
        return bool(self._on_device)

    def add(self, position: int, view: memoryview | OnDevice) -> None:
        """Add a piece. numpy copies as fast as memcpy, and releases the interpreter lock meanwhile."""
        import numpy as np

        if isinstance(view, OnDevice):
            self._on_device.append((position, view))
            return
        array = np.frombuffer(view, np.uint8)
        self._size += len(array)
        for start in range(0, len(array), _SLICE):
            self._waiting.append((position + start, array[start : start + _SLICE]))

    def queue(self, cuda: Cuda) -> Callable[[], None]:
        """Start to copy the pieces on devices; returns a function that waits for the end."""
        for position, part in self._on_device:
            cuda.queue(self._target[position : position + len(part)], part.data)
        return cuda.mark({part.data.device for _, part in self._on_device})

    def copy(self) -> None:
        """Copy all other pieces now."""
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
