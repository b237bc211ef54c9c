"""The watch loop on scripted streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic_trainer.clock import pause
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.store.api import EventKind, KeyValue, Snapshot, WatchEvent
from elastic_trainer.store.watch import EventBatch, KeyHistory, WatchLoop, WatchReading
from tests.support.listeners import Recorder


def history(revision: int, *, term: int = 2, cluster: int = 9) -> KeyHistory:
    return KeyHistory(cluster, term, revision)


def created(now: KeyHistory) -> EventBatch:
    return EventBatch(now, created=True)


def changes(*revisions: int) -> EventBatch:
    items = (KeyValue("/k", str(revision).encode(), 1, revision) for revision in revisions)
    return EventBatch(history(revisions[-1]), tuple(WatchEvent(EventKind.PUT, item) for item in items))


class Script:
    """A store whose streams play what is given: batches in turn, then an error, or silence."""

    def __init__(self) -> None:
        self.opened: queue.Queue[int] = queue.Queue()
        self.streams: queue.Queue[ScriptedStream] = queue.Queue()

    def then(self, *batches: EventBatch, reading: WatchReading | None = None, stays: bool = False) -> Script:
        self.streams.put(ScriptedStream(batches, reading, stays))
        return self

    def open(self, revision: int) -> ScriptedStream:
        self.opened.put(revision)
        try:
            return self.streams.get_nowait()
        except queue.Empty:
            raise StoreUnavailableError("nothing there") from None

    def opened_at(self, count: int) -> list[int]:
        """The revisions of the next ``count`` streams."""
        return [self.opened.get(timeout=30.0) for _ in range(count)]


class ScriptedStream:
    def __init__(self, batches: Sequence[EventBatch], reading: WatchReading | None, stays: bool) -> None:
        self._batches, self._reading, self._stays = batches, reading, stays
        self._cancelled = threading.Event()

    def batches(self) -> Iterator[EventBatch]:
        yield from self._batches
        if self._stays:
            self._cancelled.wait(30.0)
        raise StoreUnavailableError("stream lost")

    def read(self) -> WatchReading:
        if self._reading is None:
            raise StoreUnavailableError("no answer")
        return self._reading

    def cancel(self) -> None:
        self._cancelled.set()


@contextmanager
def looping(script: Script) -> Iterator[Recorder]:
    loop = WatchLoop(script.open, recorder := Recorder(), "t")
    yield recorder
    loop.close()


def reading(now: KeyHistory, *values: bytes) -> WatchReading:
    items = tuple(KeyValue(f"/k{number}", value, 1, 1) for number, value in enumerate(values))
    return WatchReading(Snapshot(items, now.revision), now)


def test_events_that_the_snapshot_holds_are_dropped() -> None:
    """The stream opens before the read, so what lies between them comes in both and is told once."""
    script = Script().then(created(history(5)), changes(6, 7), changes(8), reading=reading(history(7)), stays=True)
    with looping(script) as recorder:
        recorder.wait_events(1)
        assert recorder.values() == [b"8"]
        assert script.opened_at(1) == [0]


def test_a_lost_stream_is_resumed_after_the_last_event() -> None:
    """The next stream begins one revision later; an event that comes again is dropped."""
    script = Script().then(created(history(5)), changes(6), reading=reading(history(5)))
    script.then(created(history(8)), changes(6, 7), stays=True)
    with looping(script) as recorder:
        recorder.wait_events(2)
        assert recorder.values() == [b"6", b"7"]
        assert script.opened_at(2) == [0, 7]
        assert recorder.connected == [True, False, True]
        assert len(recorder.snapshots) == 1


def test_a_progress_notification_advances_the_resumption() -> None:
    """A quiet watch need not fall behind compactions."""
    script = Script().then(created(history(5)), EventBatch(history(40)), reading=reading(history(5)))
    script.then(created(history(40)), stays=True)
    with looping(script):
        assert script.opened_at(2) == [0, 41]


def test_a_lagging_member_is_not_taken_for_a_wiped_store() -> None:
    """A revision behind ours is only trusted after a linearizable read: here the read is ahead, and we go on."""
    script = Script().then(created(history(50)), reading=reading(history(50)))
    script.then(created(history(40)), changes(51), reading=reading(history(51)), stays=True)
    with looping(script) as recorder:
        recorder.wait_events(1)
        assert len(recorder.snapshots) == 1
        assert script.opened_at(2) == [0, 51]


def _restarts(now: KeyHistory) -> list[int]:
    """The snapshots' revisions when the store comes back as ``now`` after revision 50, term 2, cluster 9."""
    script = Script().then(created(history(50)), reading=reading(history(50)))
    script.then(created(now), reading=reading(now))
    script.then(created(now), reading=reading(now), stays=True)
    with looping(script) as recorder:
        recorder.wait_snapshots(2)
        assert script.opened_at(3) == [0, 51, 0]
    return [snapshot.revision for snapshot in recorder.snapshots]


def test_a_wiped_store_leads_to_a_new_snapshot() -> None:
    """Its revision went back, or it is another cluster, or its term went back though its revision is ahead."""
    assert _restarts(history(3)) == [50, 3]
    assert _restarts(history(99, cluster=8)) == [50, 99]
    assert _restarts(history(99, term=1)) == [50, 99]


def test_a_refused_watch_is_tried_again() -> None:
    """Say, with a token that has expired: the next stream has a new one."""
    script = Script().then(EventBatch(history(5), created=True, refused="permission denied"))
    script.then(created(history(5)), reading=reading(history(5)), stays=True)
    with looping(script) as recorder:
        recorder.wait_snapshots(1)
        assert recorder.connected == [False, True]


def test_a_failed_first_read_begins_from_now_again() -> None:
    """Without a snapshot there is nothing to resume."""
    script = Script().then(created(history(5)))
    script.then(created(history(6)), reading=reading(history(6)), stays=True)
    with looping(script) as recorder:
        assert recorder.wait_snapshots(1).revision == 6
        assert script.opened_at(2) == [0, 0]


def test_an_absent_store_is_not_hammered() -> None:
    """While nothing answers, tries are at most a few a second, and the loss is told once."""
    with looping(script := Script()) as recorder:
        pause(2.0)
    assert recorder.connected == [False]
    # the shortest pauses are 0.05, 0.1, 0.2 and then 0.25 s
    assert 2 <= script.opened.qsize() <= 13
