"""A directory on a disk, or behind a link, with a limited number of bytes a second for this process."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Final

from elastic_trainer.checkpoint.storage import ByteSource, PosixStorage, Sink
from elastic_trainer.clock import SYSTEM, pause

_LARGEST_MANIFEST: Final = 1 << 16


class Bucket:
    """Passes ``rate`` bytes a second on, however many threads share it; nothing is saved up."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, SYSTEM.monotonic()) + size / self._rate
            wait_s = self._free_at - SYSTEM.monotonic()
        pause(wait_s)


class Stalled(Bucket):
    """Passes no tensors on until there is a file ``released``, then all."""

    def __init__(self, released: Path) -> None:
        super().__init__(math.inf)
        self._released = released

    def take(self, size: int) -> None:
        while size > _LARGEST_MANIFEST and not self._released.exists():
            pause(0.05)


class ThrottledStorage(PosixStorage):
    """A directory into which, and from which, its holder moves ``rate`` bytes a second, or as that bucket says."""

    def __init__(self, root: Path, rate: float | Bucket) -> None:
        super().__init__(root)
        self._bucket = rate if isinstance(rate, Bucket) else Bucket(rate)

    def sink(self, name: str, file: str) -> Sink:
        sink = super().sink(name, file)
        write = sink.write

        def throttled(data: memoryview) -> None:
            self._bucket.take(len(data))
            write(data)

        sink.write = throttled  # type: ignore[method-assign]
        return sink

    def source(self, name: str, file: str) -> ByteSource:
        source = super().source(name, file)
        read_into = source.read_into

        def throttled(buffer: memoryview, offset: int) -> bool:
            self._bucket.take(len(buffer))
            return read_into(buffer, offset)

        source.read_into = throttled  # type: ignore[method-assign]
        return source
