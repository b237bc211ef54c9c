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
        """Return when ``size`` bytes have passed."""
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


class ThrottledSink:
    """A file whose bytes pass through ``bucket``."""

    def __init__(self, sink: Sink, bucket: Bucket) -> None:
        self._sink, self._bucket = sink, bucket

    def write(self, data: memoryview) -> None:
        self._bucket.take(len(data))
        self._sink.write(data)

    def finish(self, *, durable: bool = True) -> None:
        self._sink.finish(durable=durable)

    def abandon(self) -> None:
        self._sink.abandon()


class ThrottledSource:
    """A file whose bytes pass through ``bucket``."""

    def __init__(self, source: ByteSource, bucket: Bucket) -> None:
        self._source, self._bucket = source, bucket
        self.size, self.readers = source.size, source.readers

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        self._bucket.take(len(buffer))
        return self._source.read_into(buffer, offset)

    def close(self) -> None:
        self._source.close()


class ThrottledStorage(PosixStorage):
    """A directory into which, and from which, its holder moves ``rate`` bytes a second, or as that bucket says."""

    def __init__(self, root: Path, rate: float | Bucket) -> None:
        super().__init__(root)
        self._bucket = rate if isinstance(rate, Bucket) else Bucket(rate)

    def sink(self, name: str, file: str) -> Sink:
        return ThrottledSink(super().sink(name, file), self._bucket)

    def source(self, name: str, file: str) -> ByteSource:
        return ThrottledSource(super().source(name, file), self._bucket)
