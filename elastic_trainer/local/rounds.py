"""Follows the changes of a run's round document in the store.

*Runs in* the local cluster's process; changes arrive on the watch's thread and wait in a queue.
*Owns* one watch. *Fails by* nothing: while the store is unreachable the queue stays empty; it skips unreadable
documents. *Invariant*: documents come out in the order of their revisions, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from queue import SimpleQueue

from elastic_trainer.clock import SYSTEM
from elastic_trainer.membership.documents import DocumentError, RoundDocument
from elastic_trainer.store.api import EventKind, KeyValue, Snapshot, Store, WatchEvent


class RoundFeed:
    """A listener of ``key``; :meth:`take` returns new documents with their arrival times (monotonic seconds).

    Closing the store ends it.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._queue: SimpleQueue[tuple[RoundDocument, float]] = SimpleQueue()
        self._seen = 0
        store.watch(key, self, exact=True)

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
                self._queue.put((RoundDocument.decode(item.value, item.key), SYSTEM.monotonic()))
            except DocumentError:
                continue
