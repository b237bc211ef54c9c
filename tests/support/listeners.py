"""A watch listener that keeps what it hears, for tests to wait for and judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elastic_trainer.store.api import EventKind, Snapshot, WatchEvent

LIMIT_S = 30.0


class Recorder:
    """Keeps snapshots, events and connection news; checks that revisions never go back between two snapshots."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.events: list[WatchEvent] = []
        self.connected: list[bool] = []
        self.threads: set[str] = set()
        self.faults: list[str] = []
        self._changed = threading.Condition()
        self._revision = 0

    def on_snapshot(self, snapshot: Snapshot) -> None:
        with self._changed:
            self.snapshots.append(snapshot)
            self._revision = snapshot.revision
            self._note()

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        with self._changed:
            for event in events:
                if event.item.mod_revision < self._revision or not self.snapshots:
                    self.faults.append(f"{event} after revision {self._revision}")
                self._revision = event.item.mod_revision
            self.events.extend(events)
            self._note()

    def on_connected(self, connected: bool) -> None:
        with self._changed:
            if self.connected and self.connected[-1] is connected:
                self.faults.append(f"connected={connected} told twice")
            self.connected.append(connected)
            self._note()

    def _note(self) -> None:
        self.threads.add(threading.current_thread().name)
        self._changed.notify_all()

    def wait(self, condition: Callable[[Recorder], bool], what: str) -> None:
        """Wait until ``condition(self)`` holds; fail the test with ``what`` otherwise."""
        with self._changed:
            held = self._changed.wait_for(lambda: condition(self), LIMIT_S)
        assert held, f"{what}: {self.describe()}"
        assert self.faults == []

    def wait_snapshots(self, count: int) -> Snapshot:
        """Wait for ``count`` snapshots; the newest."""
        self.wait(lambda me: len(me.snapshots) >= count, f"{count} snapshots")
        return self.snapshots[-1]

    def wait_events(self, count: int) -> list[WatchEvent]:
        self.wait(lambda me: len(me.events) >= count, f"{count} events")
        return self.events

    def values(self) -> list[bytes]:
        """The values of all puts seen as events, in order."""
        return [event.item.value for event in self.events if event.kind is EventKind.PUT]

    def describe(self) -> str:
        return f"{len(self.snapshots)} snapshots, {len(self.events)} events, connected {self.connected}, {self.faults}"
