"""The files of a checkpoint to be written, as bytes that are fetched piece by piece. Pure.

The commit needs no tensor library, so any holder of the bytes (the training process, or its node's agent) can
commit them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PIECE = 1 << 20
"""Bytes read and hashed at a time: small enough to stay in a core's cache in between."""
_SMALL = 64 << 10
_FILES_OF_ONE = 2
"""The tensors and the skeleton."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Bytes in the memory of an accelerator, as the one-dimensional byte tensor ``data``."""

    data: Any

    def __len__(self) -> int:
        return int(self.data.nbytes)

    def __getitem__(self, part: slice) -> OnDevice:
        return OnDevice(self.data[part])

    def fetch(self) -> memoryview:
        """A copy in host memory."""
        return memoryview(self.data.cpu().numpy())


@dataclass(frozen=True, slots=True)
class FileImage:
    """One file: ``head`` first, then ``body_size`` bytes that ``body()`` yields in order (each time it is called)."""

    name: str
    head: bytes
    body_size: int
    body: Callable[[], Iterable[memoryview]]
    checksums: tuple[str, ...] = ()
    """Those of its record, if this process has taken them from memory that only it writes to. A commit that finds them
    takes no others, so bytes that came from elsewhere must have none."""
    parts: Callable[[], Iterable[memoryview | OnDevice]] | None = None
    """``body`` with accelerator data still on the accelerator."""

    @property
    def size(self) -> int:
        return len(self.head) + self.body_size


@dataclass(frozen=True, slots=True)
class WatchedTensor:
    """Numbers that must be finite: element type and position in the body of the file ``file``; ``label`` for people."""

    label: str
    file: str
    dtype: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Image:
    """All files but the manifest."""

    files: tuple[FileImage, ...]
    watched: tuple[WatchedTensor, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def shared(self) -> bool:
        """Whether its tensors are split into several files, for several writers."""
        return len(self.files) > _FILES_OF_ONE


def from_bytes(name: str, content: bytes) -> FileImage:
    """A file of the given content."""
    return FileImage(name, b"", len(content), lambda: (memoryview(content),))


def pieces(views: Iterable[memoryview], chunk_size: int) -> Iterator[memoryview]:
    """The bytes of ``views`` in pieces, none of which spans a multiple of ``chunk_size``.

    Runs of small views are joined first: thousands of scalars become a few writes.
    """
    position = 0
    for view in _joined(views):
        start = 0
        while start < len(view):
            length = min(len(view) - start, chunk_size - position % chunk_size)
            yield view[start : start + length]
            start += length
            position += length


def _joined(views: Iterable[memoryview]) -> Iterator[memoryview]:
    waiting: list[memoryview] = []
    waiting_size = 0
    for view in views:
        if len(view) < _SMALL and waiting_size < PIECE:
            waiting.append(view)
            waiting_size += len(view)
            continue
        if waiting:
            yield memoryview(b"".join(waiting))
            waiting, waiting_size = [], 0
        yield view
    if waiting:
        yield memoryview(b"".join(waiting))
