"""What the last node of a run leaves behind, and who removes it."""

from __future__ import annotations

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.composition import broken
from elastic_trainer.membership.documents import Departure, NodeRecord, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.health import Incident
from elastic_trainer.membership.parting import parting
from elastic_trainer.membership.round_write import Author, round_write
from elastic_trainer.model import Cause
from elastic_trainer.store.api import Delete, Put
from elastic_trainer.store.keys import RunKeys
from tests.support.memory_store import MemoryStore
from tests.unit.membership.test_own_key import OLD, Owner

KEYS = RunKeys("/p", "run")


def departure(*, planned: bool) -> Departure:
    return Departure(wall=5.0, node="a", planned=planned, reason="SIGTERM" if planned else "no peer", exit_code=143)


def left(store: MemoryStore, *, planned: bool) -> tuple[Departure | None, list[str]]:
    """What is in the store when node a has left: the departure, and what incidents say."""
    guards, if_last, else_ = parting(KEYS, departure(planned=planned), None)
    store.transact(guards, if_last, else_, deadline=Deadline.after(5.0))
    found = store.get(KEYS.departure, Deadline.after(5.0)).first
    incidents = store.range(KEYS.incidents, Deadline.after(5.0)).items
    said = [Incident.decode(each.value, each.key).reason for each in incidents]
    return None if found is None else Departure.decode(found.value, found.key), said


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_node_says_how_the_run_was_left(planned: bool) -> None:
    """Whether somebody stopped it or it was given up is one key, and one incident for people."""
    found, (said,) = left(MemoryStore(), planned=planned)
    assert found == departure(planned=planned)
    assert said == ("the last node left on request: SIGTERM" if planned else "node a gave up: no peer (exit code 143)")


@pytest.mark.parametrize("planned", [True, False])
def test_a_node_that_leaves_others_behind_is_no_end(planned: bool) -> None:
    """While another key stands nothing says that the run is left; a node that gave up is still recorded."""
    store = MemoryStore()
    record: NodeRecord = OLD
    store.transact([], [Put(KEYS.node("b"), record.encode())], deadline=Deadline.after(5.0))
    found, said = left(store, planned=planned)
    assert found is None
    assert len(said) == (0 if planned else 1)
    store.transact([], [Delete(KEYS.node("b"))], deadline=Deadline.after(5.0))
    assert left(store, planned=planned)[0] is not None


def test_the_next_node_that_comes_takes_it_away() -> None:
    """A run that was stopped, came back and lost its nodes was not stopped."""
    owner = Owner()
    owner.store.transact([], [Put(KEYS.departure, departure(planned=True).encode())], deadline=owner.limit())
    owner.show(OLD)
    assert owner.store.get(KEYS.departure, owner.limit()).first is None


def test_the_fault_that_ends_a_run_is_recorded_at_once() -> None:
    """Who breaks a round opens its incident, with the lost node; the round that follows takes its place."""
    author = Author(KEYS, "a", 11)
    members = tuple(RoundMember(name, 11 + place, 1, place, 1) for place, name in enumerate(("a", "b")))
    active = RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=members)

    def opened(document: RoundDocument) -> list[Incident]:
        write = round_write(author, document, 7, 5.0)
        assert write is not None
        puts = [each for each in write.success if isinstance(each, Put) and each.key == KEYS.open_incident]
        return [Incident.decode(each.value, each.key) for each in puts]

    (lost,) = opened(broken(active, "node b is gone", cause=Cause.NODE_LOST, lost=("b",)))
    assert (lost.open, lost.cause, lost.nodes, lost.world_before) == (True, Cause.NODE_LOST, ("b",), 2)
    (own,) = opened(broken(active, "node a left the round", worker_failed=True, cause=Cause.WORKER_LOST))
    assert own.nodes == ("a",)
    following = round_write(author, active.model_copy(update={"number": 2}), 7, 5.0)
    assert following is not None
    assert Delete(KEYS.open_incident) in following.success
