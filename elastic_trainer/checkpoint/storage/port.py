"""The storage port: the operations of checkpoints on a directory or a prefix of a bucket.

*Fails by* StorageError for anything that keeps a checkpoint from being written (full, read-only, no permission), and
by OSError for reading, which the readers translate, since only they know what it means for the entry.
*Invariant*: an entry appears under its final name only by :meth:`Storage.publish`, with all its data durable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Sink(Protocol):
    """A file being written."""

    def write(self, data: memoryview) -> None: ...

    def finish(self, *, durable: bool = True) -> None:
        """Make it ``durable``, unless nothing depends on it, and close it."""
        ...

    def abandon(self) -> None:
        """Close it, whatever it holds. May follow ``finish``."""
        ...


class ByteSource(Protocol):
    """A file being read; ``read_into`` may be called from several threads."""

    size: int
    readers: int
    """How many threads may read it at a time with profit."""

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` from byte ``offset`` on; False if the file ends before. OSError if it cannot be read."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a storage. ``words`` is the text that it left there.

    If the storage cannot know whether it lives, another process may take over in ``expires_in_s`` unless it renews.
    """

    words: str
    expires_in_s: float = 0.0
    shown_at: float = 0.0
    """When it last renewed, by the storage's clock."""


class Storage(Protocol):
    """One directory of checkpoints. Names are single path components."""

    @property
    def location(self) -> str: ...

    def prepare(self) -> None:
        """Create the directory if it is missing."""
        ...

    def names(self) -> tuple[str, ...]:
        """What it holds; empty if it does not exist. OSError if it cannot be listed."""
        ...

    def exists(self, name: str) -> bool: ...

    def free_bytes(self) -> int | None:
        """Space left for this user, or None where there is no such limit."""
        ...

    def create(self, temporary: str, name: str | None = None) -> None:
        """Begin the entry ``temporary``, to be published as ``name``; None: it never will be."""
        ...

    def sink(self, name: str, file: str) -> Sink: ...

    # ---- an entry that several processes write

    def join(self, temporary: str, name: str) -> None:
        """Write files of the entry ``temporary`` too, which another process publishes as ``name``."""
        ...

    def mark(self, temporary: str, file: str) -> bool:
        """Leave a mark of this name; False if it is there already. Of several callers one gets True."""
        ...

    def files(self, temporary: str) -> frozenset[str]:
        """The marks, and what else is there; none if it is gone. OSError if it cannot be listed."""
        ...

    def discard(self, temporary: str, file: str) -> None:
        """Remove a mark or a file, which may be gone already."""
        ...

    def source(self, name: str, file: str) -> ByteSource:
        """The file ``file`` of the entry ``name``; OSError if it cannot be opened."""
        ...

    def publish(self, temporary: str, name: str) -> None:
        """Let the finished entry ``temporary`` appear as ``name``, durably; never replaces anything."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Move an entry; OSError if ``old`` is gone (ENOENT), ``new`` exists, or it is not allowed."""
        ...

    def remove(self, name: str) -> None:
        """Remove an entry and all in it; one that is gone is fine. OSError if it is not allowed."""
        ...

    def idle_s(self, name: str, reference: str) -> float:
        """Seconds between the last write to anything in ``name`` and that to ``reference``. OSError if unknown.

        Both times are the storage's own: a file server's clock need not be this machine's.
        """
        ...

    def hold(self, words: str, gives_way: Callable[[str], bool]) -> Holder | None:
        """Lock it for this process, which leaves ``words`` there; the holder if another process has it.

        ``gives_way`` judges a holder by its words where the storage cannot know whether it lives.
        """
        ...

    def let_go(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of a request with all its retries: a small one, and one that carries a part of a file."""

    request_s: float = 60.0
    part_s: float = 300.0
    connect_s: float = 10.0
    silence_s: float = 30.0
    """After that long without a byte a try is given up for the next."""
