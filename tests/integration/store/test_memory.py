"""What the memory store can do beyond the contract: virtual time and faults."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, StoreUnavailableError
from elastic_trainer.store.api import EventKind, Put, Read, absent
from tests.support.listeners import LIMIT_S, Recorder
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore


def soon() -> Deadline:
    return Deadline.after(60.0)


def put(store: MemoryStore, key: str, value: bytes = b"", lease: int = 0) -> None:
    store.transact([], [Put(key, value, lease)], deadline=soon())


def test_leases_run_on_the_backends_clock() -> None:
    """An advanced clock ends leases at once and tells the watches; keep-alives move the end."""
    backend = MemoryBackend(ManualClock())
    store = MemoryStore(backend)
    recorder = Recorder()
    watch = store.watch("/n/", recorder)
    recorder.wait_snapshots(1)
    lease = store.grant(10.0, soon())
    put(store, "/n/a", b"", lease.id)
    backend.advance(9.0)
    assert store.keep_alive(lease.id, soon()) == 10.0
    backend.advance(9.9)
    assert store.get("/n/a", soon()).first is not None
    backend.advance(0.2)
    assert store.get("/n/a", soon()).first is None
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.id, soon())
    assert backend.settle()
    assert [event.kind for event in recorder.events] == [EventKind.PUT, EventKind.DELETE]
    watch.close()


def test_an_outage_stops_everything_and_gives_leases_their_time_back() -> None:
    """Nobody can act during an outage; afterwards leases begin anew, as after an etcd restart."""
    backend = MemoryBackend(ManualClock())
    store = MemoryStore(backend)
    lease = store.grant(10.0, soon())
    put(store, "/n/a", b"", lease.id)
    backend.advance(8.0)
    backend.outage(True)
    for call in (lambda: store.get("/n/a", soon()), lambda: store.grant(5.0, soon()), lambda: put(store, "/n/b")):
        with pytest.raises(StoreUnavailableError):
            call()
    backend.advance(60.0)
    backend.outage(False)
    backend.advance(9.9)
    assert store.get("/n/a", soon()).first is not None
    assert store.get("/n/b", soon()).first is None
    backend.advance(0.2)
    assert store.get("/n/a", soon()).first is None


def test_a_watch_goes_on_after_an_outage() -> None:
    """It hears of the loss once, and gets what it missed, once."""
    backend = MemoryBackend()
    store = MemoryStore(backend)
    recorder = Recorder()
    watch = store.watch("/n/", recorder)
    recorder.wait_snapshots(1)
    put(store, "/n/a", b"1")
    recorder.wait_events(1)
    backend.outage(True)
    recorder.wait(lambda me: me.connected == [True, False], "the loss")
    backend.outage(False)
    put(store, "/n/a", b"2")
    recorder.wait_events(2)
    assert recorder.values() == [b"1", b"2"]
    assert recorder.connected == [True, False, True]
    assert len(recorder.snapshots) == 1
    watch.close()


def test_one_client_can_be_cut_off() -> None:
    """The others go on; the cut client's watch resumes, from a snapshot if the history was compacted meanwhile."""
    backend = MemoryBackend()
    near, far = MemoryStore(backend), MemoryStore(backend)
    recorder = Recorder()
    watch = far.watch("/n/", recorder)
    recorder.wait_snapshots(1)
    far.cut_off(True)
    with pytest.raises(StoreUnavailableError):
        far.get("/n/a", soon())
    recorder.wait(lambda me: me.connected == [True, False], "the loss")
    put(near, "/n/a", b"1")
    backend.compact()
    far.cut_off(False)
    assert [item.value for item in recorder.wait_snapshots(2).items] == [b"1"]
    assert recorder.events == []
    watch.close()


def test_lost_replies_leave_the_write_in_place() -> None:
    """The caller does not know, and finds out by reading; reads lose nothing."""
    backend = MemoryBackend()
    store = MemoryStore(backend)
    backend.lose_replies(1)
    store.transact([], [Read("/n/a")], deadline=soon())
    with pytest.raises(OutcomeUnknownError):
        put(store, "/n/a", b"1")
    assert store.transact([absent("/n/a")], [Put("/n/a", b"2")], deadline=soon()).succeeded is False
    item = store.get("/n/a", soon()).first
    assert item is not None
    assert item.value == b"1"


def test_a_wipe_leads_to_a_new_snapshot() -> None:
    """Keys, leases and history are gone; watches begin again."""
    backend = MemoryBackend()
    store = MemoryStore(backend)
    lease = store.grant(60.0, soon())
    put(store, "/n/a", b"1", lease.id)
    recorder = Recorder()
    watch = store.watch("/n/", recorder)
    assert len(recorder.wait_snapshots(1).items) == 1
    backend.wipe()
    assert recorder.wait_snapshots(2).items == ()
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.id, soon())
    watch.close()


def test_settle_waits_for_slow_listeners() -> None:
    """After settle every listener has dealt with every change before it."""
    backend = MemoryBackend()
    store = MemoryStore(backend)
    release = threading.Event()

    class Slow(Recorder):
        def on_connected(self, connected: bool) -> None:
            assert release.wait(LIMIT_S)
            super().on_connected(connected)

    slow, quick = Slow(), Recorder()
    watches = [store.watch("/n/", listener) for listener in (slow, quick)]
    quick.wait_snapshots(1)
    put(store, "/n/a", b"1")
    quick.wait_events(1)
    assert not backend.settle(0.2)
    release.set()
    assert backend.settle()
    assert len(slow.events) + len(slow.snapshots[0].items) == 1
    for watch in watches:
        watch.close()


def test_only_a_manual_clock_can_be_advanced() -> None:
    """Advancing real time would be a mistake of the test."""
    with pytest.raises(TypeError):
        MemoryBackend().advance(1.0)


def test_a_manual_clock_wakes_waiters_when_their_time_has_come() -> None:
    """A wait ends by the clock or by the event, whichever is first."""
    clock = ManualClock()
    event, ended = threading.Event(), threading.Event()

    def wait() -> None:
        assert not clock.wait(event, 5.0)
        ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.advance(4.9)
    assert not ended.wait(0.05)
    clock.advance(0.2)
    assert ended.wait(LIMIT_S)
    waiter.join()
    event.set()
    assert clock.wait(event, 1e9)
