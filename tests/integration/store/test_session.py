"""A lease session while the store fails."""

from __future__ import annotations

import threading

from elastic_trainer.clock import pause
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.support.waiting import soon


def test_an_outage_longer_than_its_time_does_not_lose_the_lease() -> None:
    """Only the store can say that it is gone; it is kept alive again when the store is back."""
    backend = MemoryBackend()
    session = LeaseSession(MemoryStore(backend), 2.0, soon())
    lease_id = session.lease_id
    backend.outage(True)
    assert not pause(session.ttl_s + 0.5, session.lost)
    backend.outage(False)
    assert not pause(session.ttl_s + 0.5, session.lost)
    assert session.lease_id == lease_id
    session.close()
    assert "lease-keeper" not in {thread.name for thread in threading.enumerate()}


def test_its_owner_may_give_a_lease_up() -> None:
    """Whoever learns elsewhere that the lease is gone may set ``lost``; renewal then grants another."""
    session = LeaseSession(MemoryStore(), 60.0, soon())
    first = session.lease_id
    session.lost.set()
    assert session.renew(soon()) != first
    assert not session.lost.is_set()
    session.close()
