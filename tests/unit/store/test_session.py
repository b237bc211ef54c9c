"""A lease whose keeper cannot be started; a key that is replaced over a store that writes late or loses its answers."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError
from elastic_trainer.store.api import Put, unchanged
from elastic_trainer.store.session import LeaseSession, Slot
from tests.support.memory_store import LateStore, ManualClock, MemoryBackend, MemoryStore
from tests.support.threadless import no_new_threads
from tests.support.waiting import soon
from tests.unit.agent.stage import Jumping

LIMIT_S = 60.0


class KeptStore(MemoryStore):
    """Knows which lease was refreshed last."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend(Jumping()))
        self.kept, self.refreshed = 0, threading.Event()

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        left_s = super().keep_alive(lease_id, deadline)
        self.kept = lease_id
        self.refreshed.set()
        return left_s


def test_a_lease_that_no_thread_keeps_alive_counts_as_lost() -> None:
    """Its key would vanish amid a healthy round. The next renewal grants another one, and keeps that."""
    store = KeptStore()
    session = LeaseSession(store, 3600.0, Deadline.after(LIMIT_S), Jumping())
    session.lost.set()
    with no_new_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        session.renew(Deadline.after(LIMIT_S))
    unkept = session.lease_id
    assert session.lost.is_set()
    renewed = session.renew(Deadline.after(LIMIT_S))
    assert renewed != unkept
    assert not session.lost.is_set()
    store.refreshed.clear()
    assert store.refreshed.wait(LIMIT_S)
    assert store.kept == renewed
    session.close()


@pytest.fixture
def store() -> LateStore:
    return LateStore(MemoryBackend(ManualClock()))


def value(store: LateStore) -> bytes | None:
    found = store.get("/k", soon()).first
    return found.value if found is not None else None


def held_back(store: LateStore, slot: Slot, content: bytes) -> None:
    store.holds_back = True
    with pytest.raises(OutcomeUnknownError):
        slot.replace(content, soon())
    store.holds_back = False


def test_the_newest_stays(store: LateStore) -> None:
    """Each replaces the one before; also where somebody else had written. A write that was sent before a newer one, and
    is done after it, undoes nothing; one that was done, and whose answer was lost, holds nothing up."""
    slot = Slot(store, "/k")
    for content in (b"1", b"2"):
        assert slot.replace(content, soon())
        assert value(store) == content
    store.transact([], [Put("/k", b"another's")], deadline=soon())
    assert slot.replace(b"3", soon())
    assert Slot(store, "/k").replace(b"4", soon())
    assert value(store) == b"4"
    slot.replace(b"5", soon())
    held_back(store, slot, b"6")
    slot.replace(b"7", soon())
    assert store.thaw() == [False]
    assert value(store) == b"7"
    held_back(store, slot, b"8")
    assert store.thaw() == [True]
    assert slot.replace(b"9", soon())
    assert value(store) == b"9"


def test_nothing_is_written_where_a_guard_does_not_hold(store: LateStore) -> None:
    """And the next write that may be done is."""
    slot = Slot(store, "/k")
    store.transact([], [Put("/round", b"1")], deadline=soon())
    assert not slot.replace(b"1", soon(), [unchanged("/round", 0)])
    assert value(store) is None
    assert slot.replace(b"2", soon())
