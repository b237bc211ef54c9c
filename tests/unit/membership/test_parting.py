"""What the last node of a run leaves behind, and who removes it."""

from __future__ import annotations

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import Departure, NodeRecord
from elastic_trainer.membership.health import Incident
from elastic_trainer.membership.parting import parting
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
