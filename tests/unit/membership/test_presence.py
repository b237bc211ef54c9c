"""What a node's key holds when the store has gone back to an older state."""

from __future__ import annotations

from elastic_trainer.membership.documents import NodeRecord, NodeState
from elastic_trainer.membership.presence import Presence
from elastic_trainer.store.api import Put
from elastic_trainer.store.memory import ManualClock, MemoryBackend, MemoryStore
from elastic_trainer.store.session import LeaseSession
from tests.support.crew import KEYS, TTL_S, eventually, soon

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
    found = observer.get(KEYS.node("a"), soon()).first
    assert found is not None
    assert NodeRecord.decode(found.value, found.key) == NEW
    assert found.create_revision == created == presence.create_revision

    observer.revoke(session.lease_id, soon())
    presence.show_again(soon())
    eventually(lambda: presence.lost, "the loss is not noticed")
    assert presence.away
    presence.return_from_loss(soon())
    found = observer.get(KEYS.node("a"), soon()).first
    assert found is not None
    assert NodeRecord.decode(found.value, found.key) == NEW
    presence.close()
