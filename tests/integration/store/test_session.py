"""A lease session while the store fails."""

from __future__ import annotations

import threading

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ElasticTrainerError, StoreUnavailableError
from elastic_trainer.store.session import LeaseSession, SessionListener
from tests.support.listeners import LIMIT_S
from tests.support.memory_store import MemoryBackend, MemoryStore


def soon() -> Deadline:
    return Deadline.after(60.0)


def test_an_outage_makes_the_lease_suspect_and_not_lost() -> None:
    """For longer than the TTL nothing answers: errors are told, nothing is lost, and the recovery is told."""
    backend = MemoryBackend()
    errors: list[ElasticTrainerError] = []
    recovered = threading.Event()
    silences: list[float] = []

    def on_recovered(silent_s: float) -> None:
        silences.append(silent_s)
        recovered.set()

    listener = SessionListener(on_error=errors.append, on_recovered=on_recovered)
    session = LeaseSession(MemoryStore(backend), 2.0, soon(), listener=listener)
    lease_id, refreshed = session.lease_id, session.last_refresh
    backend.outage(True)
    assert not pause(session.ttl_s + 0.5, session.lost)
    suspect = [session.suspect]
    assert errors
    assert all(isinstance(error, StoreUnavailableError) for error in errors)
    backend.outage(False)
    assert recovered.wait(LIMIT_S)
    assert silences[0] >= session.ttl_s / 3
    assert [*suspect, session.suspect] == [True, False]
    assert session.last_refresh > refreshed
    assert session.lease_id == lease_id
    assert not session.lost.is_set()
    session.close()


def test_its_owner_may_give_a_lease_up() -> None:
    """Whoever learns elsewhere that the lease is gone may set ``lost``; renewal then grants another."""
    session = LeaseSession(MemoryStore(), 60.0, soon())
    first = session.lease_id
    session.lost.set()
    assert session.renew(soon()) != first
    assert not session.lost.is_set()
    session.close()


def test_renewal_from_the_callback_works() -> None:
    """``on_lost`` runs in the keeper's thread and may renew at once."""
    store = MemoryStore()
    renewed = threading.Event()

    def on_lost() -> None:
        session.renew(soon())
        renewed.set()

    session = LeaseSession(store, 2.0, soon(), listener=SessionListener(on_lost=on_lost))
    first = session.lease_id
    store.revoke(first, soon())
    assert renewed.wait(LIMIT_S)
    assert session.lease_id != first
    assert store.keep_alive(session.lease_id, soon()) > 0
    session.close()


def test_a_failing_callback_does_not_end_the_keeping() -> None:
    """Errors in the metrics of an outage must not cost the lease."""
    backend = MemoryBackend()
    told = threading.Event()

    def on_error(error: ElasticTrainerError) -> None:
        told.set()
        raise RuntimeError("a bug in the callback")

    session = LeaseSession(MemoryStore(backend), 2.0, soon(), listener=SessionListener(on_error=on_error))
    backend.outage(True)
    assert told.wait(LIMIT_S)
    backend.outage(False)
    assert not pause(1.5 * session.ttl_s, session.lost)
    assert not session.suspect
    session.close()
