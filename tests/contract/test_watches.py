"""Watches, on every store."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from elastic_trainer.store.api import Delete, EventKind, Put, Snapshot, Store, WatchEvent
from tests.contract.conftest import World
from tests.integration.store.support import put, watching
from tests.support.listeners import LIMIT_S, Recorder
from tests.support.waiting import soon


def test_a_watch_begins_with_what_is_there_and_goes_on_with_each_change(store: Store, world: World) -> None:
    """Snapshot first, then every change of the prefix once and in order, from the watch's own thread."""
    key = world.prefix + "n/a"
    created = put(store, key, b"0")
    recorder = watching(store, world.prefix + "n/")
    assert [(item.value, item.create_revision) for item in recorder.snapshots[0].items] == [(b"0", created)]
    put(store, world.prefix + "other", b"not mine")
    for number in range(1, 6):
        put(store, key, str(number).encode())
    store.transact([], [Delete(key)], deadline=soon())
    events = recorder.wait_events(6)
    assert recorder.values() == [b"1", b"2", b"3", b"4", b"5"]
    assert {event.item.create_revision for event in events[:5]} == {created}
    assert events[5].kind is EventKind.DELETE
    assert events[5].item.mod_revision > events[4].item.mod_revision
    assert recorder.connected == [True]
    assert len(recorder.threads) == 1
    assert threading.current_thread().name not in recorder.threads


def test_an_exact_watch_sees_one_key(store: Store, world: World) -> None:
    recorder = watching(store, world.prefix + "round", exact=True)
    assert recorder.snapshots[0].items == ()
    put(store, world.prefix + "round/x", b"no")
    put(store, world.prefix + "round2", b"no")
    put(store, world.prefix + "round", b"yes")
    recorder.wait_events(1)
    assert recorder.values() == [b"yes"]


def test_the_events_of_a_transaction_arrive_together(store: Store, world: World) -> None:
    """One revision is never split: the view between two calls is always one that existed."""
    sizes: list[int] = []

    class Sizes(Recorder):
        def on_events(self, events: Sequence[WatchEvent]) -> None:
            sizes.append(len({event.item.mod_revision for event in events}) * 20 - len(events))
            super().on_events(events)

    recorder = watching(store, world.prefix, Sizes())
    for _ in range(5):
        store.transact([], [Put(f"{world.prefix}{number}", b"") for number in range(20)], deadline=soon())
    recorder.wait_events(100)
    assert set(sizes) == {0}


def test_writers_while_the_watch_begins_are_seen_once(store: Store, world: World) -> None:
    """Between snapshot and events nothing is missed and nothing comes twice, whoever writes meanwhile."""
    writer_store = world.client()
    stop = threading.Event()
    written: list[int] = []

    def write() -> None:
        while not stop.is_set():
            written.append(put(writer_store, f"{world.prefix}{len(written):06d}"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        recorders = [watching(store, world.prefix) for _ in range(8)]
    finally:
        stop.set()
        writer.join(LIMIT_S)
    for recorder in recorders:
        recorder.wait(lambda me: len(me.snapshots[0].items) + len(me.events) >= len(written), "all writes")
        seen = [item.mod_revision for item in recorder.snapshots[0].items]
        seen += [event.item.mod_revision for event in recorder.events]
        assert seen == written


def test_nothing_arrives_after_close(store: Store, world: World) -> None:
    recorder = Recorder()
    watch = store.watch(world.prefix, recorder)
    recorder.wait_snapshots(1)
    watch.close()
    watch.close()
    other = watching(store, world.prefix)
    put(store, world.prefix + "late")
    other.wait_events(1)
    assert recorder.events == []


def test_a_listener_may_close_its_own_watch(store: Store, world: World) -> None:
    closed = threading.Event()

    class Once(Recorder):
        def on_snapshot(self, snapshot: Snapshot) -> None:
            super().on_snapshot(snapshot)
            assert ready.wait(LIMIT_S)
            watch.close()
            closed.set()

    ready = threading.Event()
    recorder = Once()
    watch = store.watch(world.prefix, recorder)
    ready.set()
    assert closed.wait(LIMIT_S)
    put(store, world.prefix + "x")
    watching(store, world.prefix)
    assert recorder.events == []


def test_a_failing_listener_does_not_end_the_watch(store: Store, world: World) -> None:
    class Broken(Recorder):
        def on_events(self, events: Sequence[WatchEvent]) -> None:
            super().on_events(events)
            if len(self.events) == 1:
                raise RuntimeError("a bug in the listener")

    recorder = watching(store, world.prefix, Broken())
    put(store, world.prefix + "a", b"1")
    recorder.wait_events(1)
    put(store, world.prefix + "a", b"2")
    recorder.wait_events(2)
    assert recorder.values() == [b"1", b"2"]
    assert recorder.connected == [True]


def test_compaction_does_not_disturb_a_watch_that_keeps_up(store: Store, world: World) -> None:
    recorder = watching(store, world.prefix)
    put(store, world.prefix + "a", b"1")
    recorder.wait_events(1)
    world.compact()
    put(store, world.prefix + "a", b"2")
    recorder.wait_events(2)
    assert len(recorder.snapshots) == 1


def test_closing_the_store_ends_its_watches(world: World) -> None:
    store = world.client()
    watching(store, world.prefix + "mine/")
    store.close()
    assert f"watch-{world.prefix}mine/" not in {thread.name for thread in threading.enumerate()}
