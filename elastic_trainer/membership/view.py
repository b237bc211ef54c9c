"""What a node knows of its run: the nodes and the round document, fed by one watch.

*Runs in* the watch's thread (writes) and any thread (reads). *Owns* a condition that is notified at each change.
*Invariant*: nodes and round come from one ordered stream, so a round never shows before the nodes that it names.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.membership.documents import DocumentError, NodeRecord, RoundDocument
from elastic_trainer.membership.standing import NodeView
from elastic_trainer.store.api import EventKind, KeyValue, Snapshot, WatchEvent
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.telemetry.logs import logger


@dataclass(frozen=True, slots=True)
class Observation:
    """One consistent look at the run."""

    nodes: dict[str, NodeView]
    round: RoundDocument | None
    round_revision: int
    """Mod-revision of the round document; 0 where there is none."""
    connected: bool
    serial: int
    """Grows with each change, so that a waiter knows whether it has seen the newest."""


class RunView:
    """Listens to the run's keys."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._nodes_prefix = keys.nodes
        self.changed = threading.Condition()
        self._nodes: dict[str, NodeView] = {}
        self._round: RoundDocument | None = None
        self._round_revision = 0
        self._connected = True
        self._serial = 0
        self._loaded = False

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Replace everything."""
        with self.changed:
            self._nodes.clear()
            self._round, self._round_revision = None, 0
            for item in snapshot.items:
                self._put(item)
            self._loaded = True
            self._bump()

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        """Apply changes in order."""
        with self.changed:
            for event in events:
                if event.kind is EventKind.PUT:
                    self._put(event.item)
                else:
                    self._delete(event.item)
            self._bump()

    def on_connected(self, connected: bool) -> None:
        """Note that the stream is down or up."""
        with self.changed:
            self._connected = connected
            self._bump()

    def note_round(self, document: RoundDocument, revision: int) -> None:
        """Take over a round document that this node has just committed, ahead of the watch."""
        with self.changed:
            if revision > self._round_revision:
                self._round, self._round_revision = document, revision
                self._bump()

    def look(self) -> Observation:
        """The present state."""
        with self.changed:
            return Observation(dict(self._nodes), self._round, self._round_revision, self._connected, self._serial)

    def wait_change(self, serial: int, timeout_s: float) -> None:
        """Wait until something is newer than ``serial``, or ``timeout_s`` seconds passed."""
        with self.changed:
            self.changed.wait_for(lambda: self._serial != serial, timeout=max(0.0, timeout_s))

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait for the first snapshot."""
        with self.changed:
            return self.changed.wait_for(lambda: self._loaded, timeout=timeout_s)

    def wake(self) -> None:
        """Make waiters look again."""
        with self.changed:
            self._bump()

    def _bump(self) -> None:
        self._serial += 1
        self.changed.notify_all()

    def _put(self, item: KeyValue) -> None:
        try:
            if item.key == self._keys.round:
                if item.mod_revision > self._round_revision:
                    self._round = RoundDocument.decode(item.value, item.key)
                    self._round_revision = item.mod_revision
            elif item.key.startswith(self._nodes_prefix):
                name = item.key.removeprefix(self._nodes_prefix)
                record = NodeRecord.decode(item.value, item.key)
                self._nodes[name] = NodeView(name, item.create_revision, item.mod_revision, record)
        except DocumentError as error:
            logger().error("document.refused", key=item.key, error=str(error))

    def _delete(self, item: KeyValue) -> None:
        if item.key == self._keys.round:
            self._round, self._round_revision = None, 0
        elif item.key.startswith(self._nodes_prefix):
            self._nodes.pop(item.key.removeprefix(self._nodes_prefix), None)
