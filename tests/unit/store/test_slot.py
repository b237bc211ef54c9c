"""A key that is replaced again and again, over a store that may do writes late or lose its answers."""

from __future__ import annotations

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError
from elastic_trainer.store.api import Put, unchanged
from elastic_trainer.store.session import Slot
from tests.support.late import LateStore
from tests.support.memory_store import ManualClock, MemoryBackend


def soon() -> Deadline:
    return Deadline.after(60.0)


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
    """Each replaces the one before; also where somebody else had written, or taken the key away."""
    slot = Slot(store, "/k")
    for content in (b"1", b"2"):
        assert slot.replace(content, soon())
        assert value(store) == content
    store.transact([], [Put("/k", b"another's")], deadline=soon())
    assert slot.replace(b"3", soon())
    assert Slot(store, "/k").replace(b"4", soon())
    assert value(store) == b"4"


def test_a_late_write_undoes_nothing(store: LateStore) -> None:
    """It was sent before the newer one, and is done after it."""
    slot = Slot(store, "/k")
    slot.replace(b"1", soon())
    held_back(store, slot, b"2")
    slot.replace(b"3", soon())
    assert store.thaw() == [False]
    assert value(store) == b"3"


def test_a_lost_answer_holds_nothing_up(store: LateStore) -> None:
    """The write was done all the same: the next one follows it."""
    slot = Slot(store, "/k")
    slot.replace(b"1", soon())
    held_back(store, slot, b"2")
    assert store.thaw() == [True]
    assert slot.replace(b"3", soon())
    assert value(store) == b"3"


def test_nothing_is_written_where_a_guard_does_not_hold(store: LateStore) -> None:
    """And the next write that may be done is."""
    slot = Slot(store, "/k")
    store.transact([], [Put("/round", b"1")], deadline=soon())
    assert not slot.replace(b"1", soon(), [unchanged("/round", 0)])
    assert value(store) is None
    assert slot.replace(b"2", soon())
