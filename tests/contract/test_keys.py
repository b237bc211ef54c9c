"""Reads, guarded transactions and revisions, on every store."""

from __future__ import annotations

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, PermanentError, StoreUnavailableError
from elastic_trainer.store.api import (
    Compare,
    Delete,
    Field,
    KeyValue,
    Operation,
    Order,
    Put,
    Read,
    Relation,
    Store,
    TransactionResult,
    absent,
    created_at,
    prefix_end,
    unchanged,
)
from tests.contract.conftest import World
from tests.support.waiting import soon


def write(store: Store, *operations: Operation) -> TransactionResult:
    return store.transact([], operations, deadline=soon())


def holds(store: Store, *guards: Compare) -> bool:
    return store.transact(guards, [], deadline=soon()).succeeded


def found(store: Store, key: str) -> KeyValue:
    item = store.get(key, soon()).first
    assert item is not None
    return item


def test_a_key_is_created_once_and_keeps_its_create_revision(store: Store, world: World) -> None:
    """A put over an existing key changes its mod-revision only; deletion and another put begin a new life."""
    key = world.prefix + "a"
    assert store.get(key, soon()).first is None
    first = write(store, Put(key, b"1")).revision
    second = write(store, Put(key, b"2")).revision
    item = found(store, key)
    assert (item.key, item.value, item.create_revision, item.mod_revision) == (key, b"2", first, second)
    assert first < second
    write(store, Delete(key))
    assert store.get(key, soon()).items == ()
    third = write(store, Put(key, b"3")).revision
    again = found(store, key)
    assert again.create_revision == again.mod_revision == third > second


def test_a_prefix_is_read_in_key_order_and_can_be_limited(store: Store, world: World) -> None:
    write(store, *(Put(world.prefix + name, name.encode()) for name in ("n/b", "n/c", "n/a", "m/z", "o", "n")))
    found = store.range(world.prefix + "n/", soon())
    assert [item.value for item in found.items] == [b"n/a", b"n/b", b"n/c"]
    assert [item.value for item in store.range(world.prefix + "n/", soon(), limit=2).items] == [b"n/a", b"n/b"]


def test_the_oldest_keys_are_found_without_their_values(store: Store, world: World) -> None:
    """Sorted by creation and limited, a read names the most senior keys; later writes of a key change nothing, its
    deletion and return do. ``keys_only`` leaves out the values alone."""
    lease = store.grant(60.0, soon())
    try:
        created = {name: write(store, Put(f"{world.prefix}s/{name}", b"v", lease.id)).revision for name in "cadb"}
        changed = write(store, Put(world.prefix + "s/a", b"again")).revision
        write(store, Delete(world.prefix + "s/d"))
        created["d"] = write(store, Put(world.prefix + "s/d", b"back")).revision
        found = store.range(world.prefix + "s/", soon(), limit=3, order=Order.CREATE_REVISION, keys_only=True)
        assert [item.key[-1] for item in found.items] == ["c", "a", "b"]
        assert [item.create_revision for item in found.items] == [created[name] for name in "cab"]
        assert [item.mod_revision for item in found.items] == [created["c"], changed, created["b"]]
        assert [item.lease for item in found.items] == [lease.id, 0, lease.id]
        assert {item.value for item in found.items} == {b""}
        everything = store.range(world.prefix + "s/", soon(), order=Order.CREATE_REVISION)
        assert [item.value for item in everything.items] == [b"v", b"again", b"v", b"back"]
    finally:
        store.revoke(lease.id, soon())


def test_a_transaction_reads_the_oldest_keys_with_its_own_write_among_them(store: Store, world: World) -> None:
    """A node learns its seniority from the very transaction that creates its key."""
    start, end = world.prefix + "t/", prefix_end(world.prefix + "t/")
    for name, oldest in (("z", ["z"]), ("y", ["z", "y"]), ("x", ["z", "y"])):
        wanted = Read(start, end, limit=2, order=Order.CREATE_REVISION, keys_only=True)
        done = store.transact([absent(start + name)], [Put(start + name, b"v"), wanted], deadline=soon())
        assert [item.key for item in done.reads[0].items] == [start + each for each in oldest]
    only = store.transact([], [Read(start, end, limit=2), Read(start + "z", keys_only=True)], deadline=soon())
    assert [[(item.key, item.value) for item in read.items] for read in only.reads] == [
        [(start + "x", b"v"), (start + "y", b"v")],
        [(start + "z", b"")],
    ]


def test_a_transaction_is_one_revision_and_reads_see_its_writes(store: Store, world: World) -> None:
    puts = Put(world.prefix + "x", b"1"), Put(world.prefix + "y", b"2")
    done = write(store, *puts, Read(world.prefix, prefix_end(world.prefix)))
    assert done.succeeded
    seen = [(item.value, item.mod_revision) for item in done.reads[0].items]
    assert seen == [(b"1", done.revision), (b"2", done.revision)]
    assert done.reads[0].revision == done.revision


def test_what_changes_nothing_takes_no_revision(store: Store, world: World) -> None:
    before = write(store, Put(world.prefix + "a", b"")).revision
    assert write(store, Delete(world.prefix + "none")).revision == before
    assert write(store, Read(world.prefix + "a")).revision == before
    assert store.get(world.prefix + "a", soon()).revision == before


def test_the_branch_follows_the_guards(store: Store, world: World) -> None:
    key = world.prefix + "round"
    created = store.transact([absent(key)], [Put(key, b"1")], [Read(key)], deadline=soon())
    assert created.succeeded
    refused = store.transact([absent(key)], [Put(key, b"2")], [Read(key)], deadline=soon())
    assert not refused.succeeded
    assert [item.value for item in refused.reads[0].items] == [b"1"]
    both = [unchanged(key, created.revision), absent(key)]
    assert not store.transact(both, [Put(key, b"3")], deadline=soon()).succeeded
    assert store.transact([unchanged(key, created.revision)], [Put(key, b"4")], deadline=soon()).succeeded
    assert not holds(store, unchanged(key, created.revision))
    assert holds(store, created_at(key, created.revision))


def test_guards_compare_the_revisions_of_a_key_that_may_be_missing(store: Store, world: World) -> None:
    there, missing = world.prefix + "k", world.prefix + "missing"
    for key, revision in ((there, write(store, Put(there, b"m")).revision), (missing, 0)):
        for field in Field:
            for relation, expected in ((Relation.EQUAL, [False, True, False]), (Relation.LESS, [True, False, False])):
                verdicts = [holds(store, Compare(key, field, relation, revision + delta)) for delta in (1, 0, -1)]
                assert verdicts == expected, (key, field, relation)


def test_a_range_guard_must_hold_for_every_key(store: Store, world: World) -> None:
    """With a range end the guard is about all keys of the range; an empty range compares as a missing key."""
    start, end = world.prefix + "nodes/", world.prefix + "nodes0"
    first = write(store, Put(start + "a", b"")).revision
    second = write(store, Put(start + "b", b"")).revision
    for limit, expected in ((first + 1, False), (second, False), (second + 1, True)):
        assert holds(store, Compare(start, Field.MOD_REVISION, Relation.LESS, limit, end)) is expected
    assert not holds(store, Compare(start, Field.CREATE_REVISION, Relation.EQUAL, first, end))
    write(store, Delete(start, end))
    assert holds(store, Compare(start, Field.CREATE_REVISION, Relation.EQUAL, 0, end))
    assert not holds(store, Compare(start, Field.CREATE_REVISION, Relation.EQUAL, first, end))


@pytest.mark.parametrize("operations", ["twice", "put and delete", "too many"])
def test_what_etcd_refuses_is_refused(store: Store, world: World, operations: str) -> None:
    """A key written twice in one branch, and more than 128 operations, are permanent errors; nothing happens."""
    key = world.prefix + "k"
    wanted: dict[str, list[Operation]] = {
        "twice": [Put(key, b"1"), Put(key, b"2")],
        "put and delete": [Put(key, b"1"), Delete(world.prefix, prefix_end(world.prefix))],
        "too many": [Put(f"{key}{number}", b"") for number in range(129)],
    }
    with pytest.raises(PermanentError):
        store.transact([], wanted[operations], deadline=soon())
    with pytest.raises(PermanentError):
        store.transact([absent(key + "x")], [], wanted[operations], deadline=soon())
    assert store.range(world.prefix, soon()).items == ()


def test_a_put_under_a_dead_lease_changes_nothing(store: Store, world: World) -> None:
    lease = store.grant(30.0, soon())
    store.revoke(lease.id, soon())
    with pytest.raises(LeaseLostError):
        write(store, Put(world.prefix + "a", b""), Put(world.prefix + "b", b"", lease.id))
    assert store.range(world.prefix, soon()).items == ()


def test_no_request_is_made_after_the_deadline_or_over_a_closed_store(store: Store, world: World) -> None:
    gone = Deadline.after(-1.0)
    with pytest.raises(StoreUnavailableError):
        store.get(world.prefix, gone)
    with pytest.raises(StoreUnavailableError):
        store.transact([], [Put(world.prefix + "a", b"")], deadline=gone)
    assert store.range(world.prefix, soon()).items == ()
    assert store.version(soon())
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.get(world.prefix, soon())
