"""Admission to a run: one spec for all nodes, no way into a closed run but on request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG, ConfigError, RunClosedError, SpecMismatchError, StoreUnavailableError
from elastic_trainer.membership.admission import admit, confirm
from elastic_trainer.membership.documents import (
    PROTOCOL_VERSION,
    DocumentError,
    JournalEntry,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
    Spec,
)
from elastic_trainer.membership.writes import event_number
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import MemoryStore
from tests.support.waiting import LIMIT_S, soon

KEYS = RunKeys("/p", "run")

SPEC = Spec(min_nodes=2, max_nodes=4)
NODE = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=0, state=NodeState.READY)


JOB = SPEC.model_copy(update={"user": "ann", "checkpoint_dir": "/a", "script": "train.py", "command": "12ab"})


def other(**fields: str) -> Spec:
    """The spec of a job that differs from JOB in ``fields``."""
    return JOB.model_copy(update=fields)


def enter(store: MemoryStore, spec: Spec = SPEC, *, reopen: bool = False, **more: Any) -> None:
    """A node with ``spec`` comes."""
    admit(store, KEYS, spec, reopen=reopen, deadline=soon(), **more)


def put(store: MemoryStore, key: str, value: bytes) -> MemoryStore:
    store.transact([], [Put(key, value)], deadline=soon())
    return store


def value(store: MemoryStore, key: str) -> bytes:
    found = store.get(key, soon()).first
    assert found is not None
    return found.value


def begun(spec: Spec = JOB, *, alive: bool) -> MemoryStore:
    """A node with ``spec`` has been admitted; one of its nodes is there, or none."""
    store = MemoryStore()
    enter(store, spec)
    return put(store, KEYS.node("a"), NODE.encode()) if alive else store


FIELDS = [("user", "bob"), ("checkpoint_dir", "/b"), ("script", "other.py"), ("command", "34cd")]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_node_of_another_job_is_refused_while_nodes_of_the_run_live(field: str, value: str) -> None:
    """One sentence names the field and both ways out; with the field allowed it joins, and the spec stays."""
    store = begun(alive=True)
    with pytest.raises(SpecMismatchError) as raised:
        enter(store, other(**{field: value}))
    assert "run 'run' is another job's: " in raised.value.message
    assert ("arguments" if field == "command" else field) in raised.value.message
    assert "--rdzv-id" in str(raised.value.hint)
    assert f"allow_different={field}" in str(raised.value.hint)
    enter(store, other(**{field: value}), allowed={field})
    assert spec_of(store) == JOB


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_run_without_nodes_goes_on_with_another_command_but_for_the_same_owner(field: str, value: str) -> None:
    """More epochs, say: resumed with other arguments. Its user and checkpoint directory stay, unless allowed."""
    store, changed = begun(alive=False), other(**{field: value})
    if field in ("user", "checkpoint_dir"):
        with pytest.raises(SpecMismatchError, match=field):
            enter(store, changed)
        assert spec_of(store) == JOB
        enter(store, changed, allowed={field})
    else:
        enter(store, changed)
    assert spec_of(store) == changed


@pytest.mark.parametrize("alive", [True, False])
def test_a_spec_of_an_earlier_version_lets_everybody_in(alive: bool) -> None:
    store = begun(SPEC, alive=alive)
    enter(store, JOB)
    assert spec_of(store) == (SPEC if alive else JOB)


def test_of_two_jobs_that_start_at_once_one_is_refused() -> None:
    """Both were admitted before a node of either was there: the first finds the second's spec once its key is there."""
    store = begun(alive=False)
    enter(store, other(command="34cd"))
    confirm(store, KEYS, other(command="34cd"), (), soon())
    with pytest.raises(SpecMismatchError, match="other arguments"):
        confirm(store, KEYS, JOB, (), soon())
    confirm(store, KEYS, JOB, {"command"}, soon())


def test_a_late_node_of_a_finished_run_ends_quietly_and_a_new_start_does_not() -> None:
    """Of the same job nothing is left to do. Where a person watches, or with another command, silence would pass for a
    training: the sentence says when the run ended, and what to do."""
    store = begun(alive=False)
    close(store, RunResult.SUCCEEDED)
    entry = JournalEntry(
        wall=1700000000.0, by="a", round=7, state=RoundState.CLOSED, reason="", nodes=("a",), world_size=1
    )
    put(store, KEYS.event(event_number(round_of(store))), entry.encode())
    with pytest.raises(RunClosedError):
        enter(store, JOB)
    with pytest.raises(RunClosedError):
        enter(store, other(command="34cd"), allowed={"command"})
    for spec, watched in ((JOB, True), (other(command="34cd"), False)):
        with pytest.raises(ConfigError) as raised:
            enter(store, spec, watched=watched)
        assert raised.value.exit_code == EXIT_CONFIG
        assert "run 'run' has finished at 2023-11-14 22:13:20 UTC with success" in raised.value.message
        assert ("other arguments" in raised.value.message) is not watched
        assert "--name" in str(raised.value.hint)
        assert "reopen=true" in str(raised.value.hint)
    with pytest.raises(SpecMismatchError, match="user 'bob' here"):
        enter(store, other(user="bob"), reopen=True)
    assert round_of(store).state is RoundState.CLOSED
    enter(store, other(command="34cd"), reopen=True)
    assert spec_of(store).command == "34cd"


def spec_of(store: MemoryStore) -> Spec:
    return Spec.decode(value(store, KEYS.spec), KEYS.spec)


def round_of(store: MemoryStore) -> RoundDocument:
    return RoundDocument.decode(value(store, KEYS.round), KEYS.round)


def close(store: MemoryStore, result: RunResult, reason: str = "said so") -> None:
    member = RoundMember(node="a", create_revision=1, life=1, first_rank=0, local_world_size=1)
    closed = RoundDocument(
        number=7, nonce="n", state=RoundState.CLOSED, members=(member,), result=result, reason=reason
    )
    put(store, KEYS.round, closed.encode())


def test_the_first_node_writes_the_spec_and_others_agree_with_it() -> None:
    """Whoever disagrees with a live run is refused: exit code 78, the difference with both values, and what to do.
    Without nodes the run takes over new limits: everybody was stopped and comes back with another --nnodes."""
    store, wider = begun(SPEC, alive=True), Spec(min_nodes=1, max_nodes=8)
    before = store.get(KEYS.spec, soon()).first
    enter(store)
    assert store.get(KEYS.spec, soon()).first == before
    with pytest.raises(SpecMismatchError, match="min nodes 1 here, 2 in the run") as raised:
        enter(store, wider)
    assert raised.value.exit_code == EXIT_CONFIG
    assert "--nnodes" in str(raised.value.hint)
    assert spec_of(store) == SPEC
    empty = begun(SPEC, alive=False)
    enter(empty, wider)
    assert spec_of(empty) == wider


def test_two_first_nodes_at_once_agree_on_one_spec() -> None:
    """The one whose write came second finds the other's spec and is judged by it."""
    store = MemoryStore()
    original = store.transact

    def late(*args: object, **named: object) -> object:
        if store.get(KEYS.spec, soon()).first is None:
            wider = Spec(min_nodes=1, max_nodes=8)
            original([], [Put(KEYS.spec, wider.encode()), Put(KEYS.node("a"), NODE.encode())], deadline=soon())
        return original(*args, **named)  # type: ignore[arg-type]

    store.transact = late  # type: ignore[method-assign, assignment]
    with pytest.raises(SpecMismatchError):
        enter(store)


@pytest.mark.parametrize("result", list(RunResult))
def test_a_closed_run_is_refused_and_says_how_it_ended(result: RunResult) -> None:
    """Success and failure are distinguished, and the hint names the way back in."""
    store = MemoryStore()
    close(store, result, "3 worker failures")
    with pytest.raises(RunClosedError) as raised:
        enter(store)
    assert raised.value.succeeded is (result is RunResult.SUCCEEDED)
    assert "reopen=true" in str(raised.value.hint)
    told = "has finished" if result is RunResult.SUCCEEDED else "has failed: 3 worker failures"
    assert told in str(raised.value)


def test_reopening_begins_a_new_epoch_and_keeps_the_number() -> None:
    """Round numbers go on, so that checkpoints of the new epoch are newer than those of the old one."""
    store = MemoryStore()
    close(store, RunResult.FAILED)
    enter(store, reopen=True)
    opened = round_of(store)
    assert (opened.epoch, opened.number, opened.state, opened.members) == (2, 7, RoundState.BROKEN, ())
    enter(store, reopen=True)
    assert round_of(store) == opened, "a run that is open is not opened again"


def test_foreign_content_under_the_run_is_an_error() -> None:
    for key in (KEYS.round, KEYS.spec):
        store = put(MemoryStore(), key, b"hello")
        with pytest.raises(DocumentError, match="another program or another version"):
            enter(store, reopen=True)
        assert value(store, key) == b"hello"


def test_a_spec_that_never_settles_ends_in_an_error() -> None:
    """Somebody rewrites the spec before each of our writes: that ends, and says why."""
    store = MemoryStore()
    enter(store)
    original = store.transact

    def meddled(*args: object, **named: object) -> object:
        original([], [Put(KEYS.spec, SPEC.encode())], deadline=soon())
        return original(*args, **named)  # type: ignore[arg-type]

    store.transact = meddled  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailableError, match="changed too often"):
        admit(store, KEYS, Spec(min_nodes=1, max_nodes=2), reopen=False, deadline=soon().at_most(LIMIT_S))


@pytest.mark.parametrize(("version", "which"), [(PROTOCOL_VERSION + 1, "a newer"), (PROTOCOL_VERSION - 1, "an older")])
@pytest.mark.parametrize("key", [KEYS.spec, KEYS.round])
def test_a_run_of_another_protocol_version_is_refused(version: int, which: str, key: str) -> None:
    """Exit code 78; both versions, which is the newer one, and how to go on with the run stand in the sentence. Nothing
    is replaced, also where no node is left, on request to reopen it or not."""
    written = json.dumps({"version": version, "whatever": "it is"}).encode()
    store = put(MemoryStore(), key, written)
    for reopen in (False, True):
        with pytest.raises(SpecMismatchError) as raised:
            enter(store, reopen=reopen)
        assert raised.value.exit_code == EXIT_CONFIG
        assert f"was started by {which} elastic_trainer" in raised.value.message
        assert f"it has protocol version {version}, this node has {PROTOCOL_VERSION}" in raised.value.message
        assert f"elastic-trainer forget {KEYS.run_id} --unfinished" in str(raised.value.hint)
    assert value(store, key) == written
