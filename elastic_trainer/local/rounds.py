"""Follows the changes of a run's round document in the store.

*Runs in* the local cluster's process; changes arrive on the watch's thread and wait in a queue.
*Owns* one watch. *Fails by* nothing: while the store is unreachable the queue stays empty; it counts unreadable
documents. *Invariant*: documents come out in the order of their revisions, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Self

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.membership.documents import DocumentError, RoundDocument
from elastic_trainer.store.api import EventKind, KeyValue, Snapshot, Store, WatchEvent


class RoundFeed:
    """A listener of the store; :meth:`take` returns new documents with their arrival times (monotonic seconds)."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._queue: SimpleQueue[tuple[RoundDocument, float]] = SimpleQueue()
        self._seen = 0
        self.unreadable = 0

    @classmethod
    def follow(cls, store: Store, key: str) -> Self:
        """A feed of ``key``; closing the store ends it."""
        feed = cls()
        store.watch(key, feed, exact=True)
        return feed

    def take(self) -> list[tuple[RoundDocument, float]]:
        """Documents that arrived since the last call, oldest first."""
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._put(snapshot.items)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        self._put(event.item for event in events if event.kind is EventKind.PUT)

    def on_connected(self, connected: bool) -> None:
        """Nothing to do: the watch resumes by itself."""

    def _put(self, items: Iterable[KeyValue]) -> None:
        for item in items:
            if item.mod_revision <= self._seen:  # a snapshot after an outage repeats known documents
                continue
            self._seen = item.mod_revision
            try:
                self._queue.put((RoundDocument.decode(item.value, item.key), self._clock.monotonic()))
            except DocumentError:
                self.unreadable += 1
