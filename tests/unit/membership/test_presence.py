"""What a node's key holds when the store has gone back to an older state, or does a write late."""

from __future__ import annotations

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError
from elastic_trainer.membership.documents import NodeRecord, NodeState
from elastic_trainer.membership.presence import Presence
from elastic_trainer.store.api import Put
from elastic_trainer.store.session import LeaseSession
from tests.support.crew import KEYS, TTL_S, eventually, soon
from tests.support.late import LateStore
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

OLD = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=0)
NEW = OLD.model_copy(update={"state": NodeState.READY, "life": 3})


def test_a_record_that_went_back_is_shown_again() -> None:
    """A backup holds what the node said then: its owner writes what is so now, under the same incarnation. Where the
    backup does not know its lease, that counts as lost, and the node returns under another."""
    backend = MemoryBackend(ManualClock())
    store, observer = MemoryStore(backend), MemoryStore(backend)
    session = LeaseSession(store, TTL_S, soon())
    presence = Presence(store, KEYS, "a", session)
    presence.show_again(soon())
    assert not observer.get(KEYS.node("a"), soon()).items, "nothing was shown yet"
    presence.show(NEW, soon())
    created = presence.create_revision
    observer.transact([], [Put(KEYS.node("a"), OLD.encode(), session.lease_id)], deadline=soon())
    presence.show_again(soon())
    assert held(observer) == (NEW, created)
    assert presence.create_revision == created

    observer.revoke(session.lease_id, soon())
    presence.show_again(soon())
    eventually(lambda: presence.lost, "the loss is not noticed")
    assert presence.away
    presence.return_from_loss(soon())
    assert held(observer)[0] == NEW
    presence.close()


def test_a_write_that_comes_late_does_not_undo_a_newer_one() -> None:
    """A frozen store may read after its thaw first what a new connection brings, and then what the old one held."""
    store, presence, created = _with_a_write_held_back()
    store.holds_back = False
    newest = NEW.model_copy(update={"life": 4})
    presence.show(newest, soon())
    assert store.thaw() == [False]
    assert held(store) == (newest, created)
    presence.close()


def test_a_write_whose_answer_was_lost_is_followed_by_the_next() -> None:
    """It changed the key unnoticed: its owner reads what is there, and writes on."""
    store, presence, created = _with_a_write_held_back()
    assert store.thaw() == [True]
    newest = NEW.model_copy(update={"life": 4})
    presence.show(newest, soon())
    assert held(store) == (newest, created)
    assert presence.create_revision == created
    presence.close()


def _with_a_write_held_back() -> tuple[LateStore, Presence, int]:
    """OLD is shown, under this create-revision; NEW has been sent."""
    store = LateStore(MemoryBackend(ManualClock()))
    presence = Presence(store, KEYS, "a", LeaseSession(store, TTL_S, soon()))
    presence.show(OLD, soon())
    store.holds_back = True
    with pytest.raises(OutcomeUnknownError):
        presence.show(NEW, Deadline.after(0.0))
    return store, presence, presence.create_revision


def held(store: MemoryStore) -> tuple[NodeRecord, int]:
    """The record in the node's key, and that key's create-revision."""
    found = store.get(KEYS.node("a"), soon()).first
    assert found is not None
    return NodeRecord.decode(found.value, found.key), found.create_revision
