"""The storage port: what checkpoints ask of a directory or of a prefix in a bucket.

*Fails by* StorageError for anything that keeps a checkpoint from being written (full, read-only, no permission), and
by OSError for reading, which the readers translate, since only they know what it means for the entry.
*Invariant*: an entry appears under its final name only by :meth:`Storage.publish`, with all its data durable.
"""

from __future__ import annotations

from typing import Protocol


class Sink(Protocol):
    """A file being written."""

    def write(self, data: memoryview) -> None: ...

    def finish(self) -> None:
        """Make it durable and close it."""
        ...

    def abandon(self) -> None:
        """Close it, whatever it holds. May follow ``finish``."""
        ...


class ByteSource(Protocol):
    """A file being read; ``read_into`` may be called from several threads."""

    size: int

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` from byte ``offset`` on; False if the file ends before. OSError if it cannot be read."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """One directory of checkpoints. Names are single path components."""

    @property
    def location(self) -> str: ...

    def prepare(self) -> None:
        """Make the directory if it is missing."""
        ...

    def names(self) -> tuple[str, ...]:
        """What it holds; empty if it does not exist. OSError if it cannot be listed."""
        ...

    def exists(self, name: str) -> bool: ...

    def free_bytes(self) -> int | None:
        """Space left for this user, or None where there is no such limit."""
        ...

    def create(self, name: str) -> None: ...

    def sink(self, name: str, file: str) -> Sink: ...

    def mark(self, name: str, file: str) -> bool:
        """Make an empty file in the entry ``name``; False if it is there already. Of several callers one gets True."""
        ...

    def files(self, name: str) -> frozenset[str]:
        """The files of the entry ``name``; none if it is gone. OSError if it cannot be listed."""
        ...

    def discard(self, name: str, file: str) -> None:
        """Remove a file of the entry ``name``; one that is gone is fine."""
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

    def hold(self, words: str) -> str | None:
        """Lock it for this process, which leaves ``words`` there; the holder's words if another process has it."""
        ...

    def let_go(self) -> None: ...
