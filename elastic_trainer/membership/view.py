"""A node's view of its run: the round document, and the nodes too while it watches them.

*Runs in* the watches' threads (writes), the deciding thread (``open``, ``tidy``) and any thread (reads).
*Owns* the watch on the run, a second one while it switches, and a condition that is notified at each change.
*Invariant*: an observation comes from one ordered stream at a time, so it never has a round before the nodes that the
round names, and a switch to another stream never yields an older round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elastic_trainer.membership.cluster_view import NodeView, Observation
from elastic_trainer.membership.documents import DocumentError, NodeRecord, RoundDocument
from elastic_trainer.store.api import EventKind, KeyValue, RunKeys, Snapshot, Store, Watch, WatchEvent
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger


class Feed:
    """One watch, on the whole run or on the round document alone, and the state received through it.

    ``moved(self)`` is called with ``lock`` held after each change.
    """

    def __init__(self, keys: RunKeys, lock: threading.Condition, moved: Callable[[Feed], None], *, nodes: bool) -> None:
        self._keys, self._lock, self._moved = keys, lock, moved
        self.follows_nodes = nodes
        self.nodes: dict[str, NodeView] = {}
        self.round: RoundDocument | None = None
        self.round_revision = 0
        self.revision = 0
        self.connected = True
        self.loaded = False
        self.reloads = 0
        self._watch: Watch | None = None

    def begin(self, store: Store) -> None:
        wide = self.follows_nodes
        self._watch = store.watch(self._keys.root if wide else self._keys.round, self, exact=not wide)

    def end(self) -> None:
        """Close the watch. Call it without the lock, which the watch's thread may be waiting for."""
        if self._watch is not None:
            self._watch.close()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        with self._lock:
            self.reloads += self.loaded
            self.nodes.clear()
            self.round, self.round_revision = None, 0
            for item in snapshot.items:
                self._put(item)
            self.revision, self.loaded = snapshot.revision, True
            self._moved(self)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        with self._lock:
            for event in events:
                if event.kind is EventKind.PUT:
                    self._put(event.item)
                else:
                    self._delete(event.item)
                self.revision = event.item.mod_revision
            self._moved(self)

    def on_connected(self, connected: bool) -> None:
        with self._lock:
            self.connected = connected
            self._moved(self)

    def _put(self, item: KeyValue) -> None:
        try:
            if item.key == self._keys.round:
                if item.mod_revision > self.round_revision:
                    self.round = RoundDocument.decode(item.value, item.key)
                    self.round_revision = item.mod_revision
            elif item.key.startswith(self._keys.nodes):
                if (name := self._keys.node_id(item.key)) is None:
                    raise DocumentError(f"key {item.key!r} is that of no possible node")
                record = NodeRecord.decode(item.value, item.key)
                self.nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        except DocumentError as error:
            logger().error("document.refused", key=plain(item.key), error=str(error))

    def _delete(self, item: KeyValue) -> None:
        if item.key == self._keys.round:
            self.round, self.round_revision = None, 0
        elif (name := self._keys.node_id(item.key)) is not None:
            self.nodes.pop(name, None)


class RunView:
    """Serves observations from one feed. A second feed, opened beside it, replaces it once it knows no older round."""

    def __init__(self, keys: RunKeys, changed: threading.Condition | None = None) -> None:
        self._keys = keys
        self.changed = changed if changed is not None else threading.Condition()
        self._shown = Feed(keys, self.changed, self._moved, nodes=False)
        self._next: Feed | None = None
        self._retired: list[Feed] = []
        self._serial = 0
        self._reloads = 0  # of feeds that were replaced

    def start(self, store: Store) -> None:
        """Start by watching the round alone."""
        self._shown.begin(store)

    def switch(self, store: Store, *, nodes: bool) -> None:
        """Switch to watching the nodes and the round, or the round alone; returns at once."""
        feed = Feed(self._keys, self.changed, self._moved, nodes=nodes)
        with self.changed:
            if self._next is not None:
                return
            self._next = feed
        try:
            feed.begin(store)
        except Exception:  # for example no thread can be started
            with self.changed:
                self._next = None
            raise

    def tidy(self) -> None:
        """Close the watch of a feed that was replaced."""
        with self.changed:
            retired, self._retired = self._retired, []
        for feed in retired:
            feed.end()

    def close(self) -> None:
        with self.changed:
            self._retired += [self._shown, *([self._next] if self._next is not None else [])]
        self.tidy()

    def note_round(self, document: RoundDocument, revision: int, seen: Observation) -> None:
        """Show a round document that this node has just committed over ``seen``, ahead of the watch.

        Does nothing if everything was reloaded since: the store may have been rolled back behind the commit.
        """
        with self.changed:
            shown = self._shown
            if revision > shown.round_revision and seen.reloads == self._reloads + shown.reloads:
                shown.round, shown.round_revision = document, revision
                self._bump()

    def observation(self) -> Observation:
        with self.changed:
            shown = self._shown
            return Observation(
                dict(shown.nodes),
                shown.round,
                shown.round_revision,
                shown.connected,
                self._serial,
                shown.follows_nodes,
                shown.revision,
                self._reloads + shown.reloads,
                self._next is not None,
            )

    def wait_change(self, serial: int, timeout_s: float) -> None:
        """Wait until something is newer than ``serial``, or ``timeout_s`` seconds passed."""
        with self.changed:
            self.changed.wait_for(lambda: self._serial != serial, timeout=max(0.0, timeout_s))

    def wait_loaded(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self._shown.loaded, timeout=timeout_s)

    def wake(self) -> None:
        with self.changed:
            self._bump()

    def _moved(self, feed: Feed) -> None:
        following = self._next
        # A wiped store starts with small revisions again: then the present feed forgets its round first.
        if following is not None and following.loaded and following.revision >= self._shown.round_revision:
            self._retired.append(self._shown)
            # The new feed's first read counts as a reload: the store may have been restored since the old feed's.
            self._reloads += self._shown.reloads + 1
            self._shown, self._next = following, None
            self._bump()
        elif feed is self._shown:
            self._bump()

    def _bump(self) -> None:
        self._serial += 1
        self.changed.notify_all()
