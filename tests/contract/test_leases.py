"""Leases and the session that holds one, on every store."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import LeaseLostError
from elastic_trainer.store.api import EventKind, Put, Store
from elastic_trainer.store.session import LeaseSession
from tests.contract.conftest import World
from tests.integration.store.support import watching
from tests.support.listeners import LIMIT_S
from tests.support.waiting import soon

TTL_S = 4.0
HELD_S = 6.0
"""Kept alive at a third of it: a loaded machine may stand still for the rest."""


def test_a_lease_that_is_not_kept_alive_takes_its_keys_along(store: Store, world: World) -> None:
    """All keys of an expired lease are deleted, others stay; not before the time granted is over."""
    recorder = watching(store, world.prefix)
    store.transact([], [Put(world.prefix + "c", b"")], deadline=soon())
    asked_at = SYSTEM.monotonic()
    lease = store.grant(TTL_S, soon())
    assert lease.ttl_s >= TTL_S
    store.transact(
        [], [Put(world.prefix + "a", b"", lease.id), Put(world.prefix + "b", b"", lease.id)], deadline=soon()
    )
    events = recorder.wait_events(5)
    assert SYSTEM.monotonic() - asked_at > lease.ttl_s - 0.1
    gone = events[3:]
    assert {(event.kind, event.item.key[-1]) for event in gone} == {(EventKind.DELETE, "a"), (EventKind.DELETE, "b")}
    assert {(event.item.value, event.item.create_revision, event.item.lease) for event in gone} == {(b"", 0, 0)}
    assert [item.key[-1] for item in store.range(world.prefix, soon()).items] == ["c"]
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease.id, soon())


def test_revoking_deletes_the_keys_at_once_and_may_be_repeated(store: Store, world: World) -> None:
    lease = store.grant(600.0, soon())
    store.transact([], [Put(world.prefix + "a", b"", lease.id)], deadline=soon())
    assert [item.lease for item in store.get(world.prefix + "a", soon()).items] == [lease.id]
    store.revoke(lease.id, soon())
    assert store.get(world.prefix + "a", soon()).first is None
    store.revoke(lease.id, soon())


def test_a_key_written_again_without_its_lease_outlives_it(store: Store, world: World) -> None:
    lease = store.grant(600.0, soon())
    store.transact([], [Put(world.prefix + "a", b"1", lease.id)], deadline=soon())
    store.transact([], [Put(world.prefix + "a", b"2")], deadline=soon())
    store.revoke(lease.id, soon())
    assert [(item.value, item.lease) for item in store.get(world.prefix + "a", soon()).items] == [(b"2", 0)]


def test_a_session_keeps_its_lease_beyond_the_ttl(store: Store, world: World) -> None:
    """After more than the TTL the key of a held lease is still there; closing removes it at once."""
    session = LeaseSession(store, HELD_S, soon())
    store.transact([], [Put(world.prefix + "node", b"", session.lease_id)], deadline=soon())
    assert not pause(session.ttl_s + 2.0, session.lost)  # one that is not kept is gone 1 s after its TTL
    assert store.get(world.prefix + "node", soon()).first is not None
    session.close()
    assert store.get(world.prefix + "node", soon()).first is None
    assert not session.lost.is_set()
    assert "lease-keeper" not in {thread.name for thread in threading.enumerate()}


def test_a_revoked_lease_is_noticed_and_renewed(store: Store, world: World) -> None:
    """Losing the lease sets ``lost``; renewal is a new lease with an event of its own."""
    session = LeaseSession(store, HELD_S, soon())
    first, lost = session.lease_id, session.lost
    assert session.renew(soon()) == first, "a living lease is not renewed"
    world.client().revoke(first, soon())
    assert lost.wait(LIMIT_S)
    second = session.renew(soon())
    assert second == session.lease_id != first
    assert lost.is_set()
    assert not session.lost.is_set()
    assert not pause(session.ttl_s + 2.0, session.lost), "the new lease is kept alive"
    assert store.keep_alive(second, soon()) > 0
    session.lost.set()  # by whoever learns elsewhere that the lease is gone
    assert session.renew(soon()) != second
    assert not session.lost.is_set()
    session.close()
