"""The loop of every watch: follows a part of the store through outages, compactions and a wiped store.

*Runs in* its own thread (``watch-<what>``).
*Owns* that thread and the stream that it reads.
*Fails by* retrying, with jittered pauses, until closed; it reports lost and restored connections to the listener.
*Invariant*: after a snapshot the listener gets each later change exactly once and in revision order, until the next
snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import ElasticTrainerError, StoreUnavailableError
from elastic_trainer.store.api import Snapshot, WatchEvent, WatchListener
from elastic_trainer.store.retry import LONGEST_PAUSE_S, RetryBackoff
from elastic_trainer.telemetry.logs import logger

JOIN_LIMIT_S = 10.0
"""Seconds that ``close`` waits for a busy listener."""


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """The history of a revision. Within one history neither ``term`` nor ``revision`` ever decreases."""

    cluster: int
    term: int
    revision: int

    def precedes(self, other: KeyHistory) -> bool:
        """Whether ``other`` can be a later point of the same history."""
        return self.cluster == other.cluster and self.term <= other.term and self.revision <= other.revision


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One message of a stream. Without events, and not ``created``, it is a progress notification."""

    now: KeyHistory
    events: tuple[WatchEvent, ...] = ()
    created: bool = False
    compacted: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class WatchReading:
    """A linearizable read of all watched keys, and its history."""

    snapshot: Snapshot
    now: KeyHistory


class WatchStream(Protocol):
    """An open stream of batches; the first one is ``created``."""

    def batches(self) -> Iterator[EventBatch]:
        """The arriving batches. Raises ElasticTrainerError when the stream is lost."""

    def read(self) -> WatchReading:
        """Read all watched keys now. Raises ElasticTrainerError."""

    def cancel(self) -> None:
        """End the stream and a running read; may be called from any thread."""


OpenStream = Callable[[int], WatchStream]
"""Opens a stream of changes from a revision on (0: from now)."""

_ORIGIN = KeyHistory(0, 0, 0)


class WatchLoop:
    """A running watch on the streams that ``open_stream`` opens. Implements the port's ``Watch``."""

    def __init__(self, open_stream: OpenStream, listener: WatchListener, what: str) -> None:
        self._open_stream = open_stream
        self._listener = listener
        self._what = what
        self._seen = _ORIGIN  # everything up to this revision has been delivered; 0: nothing yet
        self._connected: bool | None = None
        self._backoff = RetryBackoff()
        self._lock = threading.Lock()
        self._stream: WatchStream | None = None
        self.closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        if threading.current_thread() is self._thread:
            return  # called by the listener: the loop ends when it returns
        self._thread.join(JOIN_LIMIT_S)
        if self._thread.is_alive():
            logger().error("watch.stuck", what=self._what, waited_s=JOIN_LIMIT_S)

    def _run(self) -> None:
        while not self.closed.is_set():
            opened_at = SYSTEM.monotonic()
            try:
                self._follow()
            except ElasticTrainerError as error:
                self._lost(error)
            except Exception as error:  # noqa: BLE001 - thread edge: a watch must not end unnoticed
                logger().exception("watch.failed", what=self._what)
                self._lost(error)
            if SYSTEM.monotonic() - opened_at > LONGEST_PAUSE_S:
                self._backoff.reset()
            pause(self._backoff.next_s(), self.closed)

    def _follow(self) -> None:
        """Deliver one stream's changes; returns when the loop should open a new stream."""
        revision = self._seen.revision
        stream = self._open_stream(revision + 1 if revision else 0)
        with self._lock:
            self._stream = stream
            if self.closed.is_set():
                stream.cancel()
        try:
            batches = stream.batches()
            if self._begin(next(batches, None), stream):
                for batch in batches:
                    if not self._take(batch):
                        return
                raise StoreUnavailableError("the store ended the watch")
        finally:
            stream.cancel()

    def _begin(self, created: EventBatch | None, stream: WatchStream) -> bool:
        """Check that the stream continues where we are, or start with a snapshot; False: open another stream."""
        if created is None or not created.created:
            raise StoreUnavailableError("the store did not confirm the watch")
        _raise_if_refused(created)
        first = self._seen.revision == 0
        if first or not self._seen.precedes(created.now):
            # The stream is behind us: the store was wiped, or this member lags. A linearizable read decides.
            reading = stream.read()
            if (
                first
            ):  # the stream was opened before the read, so it delivers all later changes; earlier ones are dropped
                self._seen = reading.now
                self._tell_connected(True)
                self._tell(self._listener.on_snapshot, reading.snapshot)
            elif not self._seen.precedes(reading.now):
                return self._forget("the store was wiped")
        self._tell_connected(True)
        return True

    def _take(self, batch: EventBatch) -> bool:
        _raise_if_refused(batch)
        if batch.compacted:
            return self._forget("the history was compacted")
        revision = batch.now.revision  # a progress notification: everything up to it was sent
        if batch.events:
            fresh = tuple(event for event in batch.events if event.item.mod_revision > self._seen.revision)
            if fresh:
                self._tell(self._listener.on_events, fresh)
            revision = batch.events[-1].item.mod_revision
        if revision > self._seen.revision:
            self._seen = KeyHistory(batch.now.cluster, max(batch.now.term, self._seen.term), revision)
        return True

    def _forget(self, cause: str) -> bool:
        logger().warning("watch.restarted", what=self._what, cause=cause, seen_revision=self._seen.revision)
        self._seen = _ORIGIN
        return False

    def _lost(self, error: Exception) -> None:
        if not self.closed.is_set():
            if self._connected is not False:
                logger().warning("watch.lost", what=self._what, cause=str(error))
            self._tell_connected(False)

    def _tell_connected(self, connected: bool) -> None:
        if connected is not self._connected:
            self._connected = connected
            self._tell(self._listener.on_connected, connected)

    def _tell(self, receive: Callable[[Any], None], news: Any) -> None:
        if self.closed.is_set():
            return
        try:
            receive(news)
        except Exception:  # noqa: BLE001 - thread edge: a listener's error must not end the watch
            logger().exception("watch.listener_failed", what=self._what)


def _raise_if_refused(batch: EventBatch) -> None:
    if batch.refused is not None:
        raise StoreUnavailableError(f"the store refuses the watch: {batch.refused}")
