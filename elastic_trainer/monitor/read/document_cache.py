"""Decoded documents by key: an unchanged key is decoded once, and an unreadable one affects no other.

*Runs in* the thread that reads the store. *Owns* the decoded documents.
*Fails by* nothing: it lists and logs an unreadable key once, and keeps the last document of that key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.store.api import KeyValue
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

DocumentT = TypeVar("DocumentT")


class DocumentCache(Generic[DocumentT]):
    """See the module; ``decode`` raises ElasticTrainerError for content that it cannot read."""

    def __init__(self, decode: Callable[[KeyValue], DocumentT]) -> None:
        self._decode = decode
        self._kept: dict[str, tuple[int, DocumentT]] = {}
        self._refused: dict[str, int] = {}
        self.changes = 0
        """Increases with each change."""

    def replace(self, items: Iterable[KeyValue]) -> None:
        """Make ``items`` the complete contents."""
        present = set()
        for item in items:
            present.add(item.key)
            self.put(item)
        self.retain(present)

    def put(self, item: KeyValue) -> None:
        """Add or update ``item``."""
        if self.knows(item):
            return
        self.changes += 1
        try:
            self._kept[item.key] = (item.mod_revision, self._decode(item))
            self._refused.pop(item.key, None)
        except ElasticTrainerError as error:
            if item.key not in self._refused:
                logger().warning("document.refused", key=plain(item.key), error=str(error))
            self._refused[item.key] = item.mod_revision

    def retain(self, keys: Iterable[str]) -> None:
        """Drop all keys except ``keys``."""
        present = set(keys)
        for gone in [key for key in (*self._kept, *self._refused) if key not in present]:
            self.changes += 1
            self._kept.pop(gone, None)
            self._refused.pop(gone, None)

    def knows(self, item: KeyValue) -> bool:
        """Whether this version of ``item`` was seen before."""
        kept = self._kept.get(item.key)
        return (kept is not None and kept[0] == item.mod_revision) or self._refused.get(item.key) == item.mod_revision

    @property
    def items(self) -> list[tuple[str, int, DocumentT]]:
        """Key, mod-revision and document of each, by key."""
        return [(key, *self._kept[key]) for key in sorted(self._kept)]

    @property
    def documents(self) -> list[DocumentT]:
        """The documents by key."""
        return [document for _, _, document in self.items]

    @property
    def refused(self) -> list[str]:
        """Keys whose present content cannot be read."""
        return sorted(self._refused)
