"""A run's keys are taken away whole, and only those of a run that nobody will go on with."""

from __future__ import annotations

import json

import pytest

from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.membership.documents import (
    JournalEntry,
    NodeRecord,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
    Spec,
)
from elastic_trainer.membership.forgetting import Remains, forget, is_old, look, refusal
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import MemoryStore
from tests.support.waiting import soon

KEYS, NEIGHBOR = RunKeys("/p", "mnist"), RunKeys("/p", "mnist-2")
DAY_S = 86400.0
NODE = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=0)


def store_with(state: RoundState, keys: RunKeys = KEYS, version: int = 2) -> MemoryStore:
    """A run in ``state`` that ended at second 1000, beside a neighbor whose name begins alike."""
    store = MemoryStore()
    result = RunResult.SUCCEEDED if state is RoundState.CLOSED else None
    current = RoundDocument(number=4, nonce="x", state=state, members=(), result=result)
    entry = JournalEntry(wall=1000.0, by="a", round=4, state=state, reason="r", nodes=("a",), world_size=1)
    documents = {keys.spec: Spec(min_nodes=1, max_nodes=2), keys.round: current, keys.event(16): entry}
    for key, document in documents.items():
        value = json.dumps(json.loads(document.encode()) | {"version": version}).encode()
        store.transact([], [Put(key, value), Put(NEIGHBOR.spec, b"{}")], deadline=soon())
    return store


def names(store: MemoryStore) -> list[str]:
    return [item.key for item in store.range("/p/", soon()).items]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_run_that_is_over_goes_with_all_its_keys(version: int) -> None:
    """Of any version, also if it had many nodes. What somebody else has written among its nodes goes with the rest."""
    store = store_with(RoundState.CLOSED, version=version)
    remains = look(store, KEYS, soon())
    assert (remains.count, remains.closed, remains.last_wall) == (3, True, 1000.0)
    members = tuple(RoundMember(f"n{n}", n, 1, n, 1) for n in range(1000))
    document = RoundDocument(number=4, nonce="x", state=RoundState.CLOSED, members=members, result=RunResult.SUCCEEDED)
    strange = Put(KEYS.nodes + "\x1b[2Jn0", NODE.encode())
    store.transact([], [Put(KEYS.round, document.encode()), strange], deadline=soon())
    remains = look(store, KEYS, soon())
    assert remains.closed
    assert refusal(remains, unfinished=False) is None
    forget(store, remains, soon())
    assert names(store) == [NEIGHBOR.spec]


def test_a_run_that_is_not_over_goes_on_request_only() -> None:
    """Its nodes may be on their way back: the sentence says what to add if they are not. What cannot be read counts as
    unfinished."""
    unread = MemoryStore()
    unread.transact([], [Put(KEYS.round, b"hello")], deadline=soon())
    states = (RoundState.ACTIVE, RoundState.DRAINING, RoundState.BROKEN)
    for store in (unread, *map(store_with, states)):
        remains = look(store, KEYS, soon())
        refused = refusal(remains, unfinished=False)
        assert refused is not None
        assert refused.exit_code == EXIT_CONFIG
        assert "--unfinished" in str(refused.hint)
        assert refusal(remains, unfinished=True) is None


def test_a_run_with_nodes_is_kept_in_any_case() -> None:
    store = store_with(RoundState.CLOSED)
    for number in range(7):
        store.transact([], [Put(KEYS.node(f"n{number}"), NODE.encode())], deadline=soon())
    for unfinished in (False, True):
        refused = refusal(look(store, KEYS, soon()), unfinished=unfinished)
        assert refused is not None
        assert "has nodes: n0, n1, n2, n3, n4 and others" in refused.message


@pytest.mark.parametrize("key", [KEYS.node("late"), KEYS.round])
def test_a_run_that_comes_back_to_life_meanwhile_is_kept(key: str) -> None:
    """A node joins, or the run is reopened, between the look and the write: nothing at all is removed."""
    store = store_with(RoundState.CLOSED)
    remains = look(store, KEYS, soon())
    store.transact([], [Put(key, NODE.encode())], deadline=soon())
    before = names(store)
    with pytest.raises(ConfigError, match="a node has just joined"):
        forget(store, remains, soon())
    assert names(store) == before


@pytest.mark.parametrize(
    ("closed", "nodes", "last_wall", "days", "old"),
    [
        (True, (), 1000.0, 2.0, True),
        (True, (), 1000.0, 3.1, False),
        (True, (), 1000.0, 0.0, True),
        (False, (), 1000.0, 2.0, False),
        (True, ("a",), 1000.0, 2.0, False),
        (True, (), 0.0, 2.0, False),
    ],
)
def test_old_is_what_has_been_over_for_so_many_days(
    closed: bool, nodes: tuple[str, ...], last_wall: float, days: float, old: bool
) -> None:
    """Never a run that is open, has nodes, or whose end nobody knows the time of."""
    remains = Remains(KEYS, 9, 3, nodes, 1, closed, last_wall)
    assert is_old(remains, 1000.0 + 3.0 * DAY_S, days) is old
