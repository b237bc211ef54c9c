"""What nodes report in the store: sums that stay whatever nodes go, and incidents, each once."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.agent.health import node_health as module
from elastic_trainer.agent.health.node_health import INCIDENTS_KEPT, HealthStore
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import OutcomeUnknownError, StoreUnavailableError
from elastic_trainer.membership.documents import GONE, Incident, added_up
from elastic_trainer.store.api import Delete, Put, RunKeys, Snapshot
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.unit.agent.readings import told_by

KEYS = RunKeys("/p", "run")
WALL = 1_700_000_000.0


def soon() -> Deadline:
    return Deadline.after(60.0)


def put(store: MemoryStore, key: str, value: bytes) -> None:
    store.transact([], [Put(key, value)], deadline=soon())


def incidents(store: MemoryStore) -> list[Incident]:
    items = store.range(KEYS.incidents, soon()).items
    return [Incident.decode(item.value, item.key) for item in items]


def sums(told: HealthStore) -> dict[str, float]:
    return added_up(health.counters for health in told.told().values())


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryBackend())


@pytest.fixture
def told(store: MemoryStore) -> HealthStore:
    """The view of node ``me``."""
    return HealthStore(store, KEYS, "me")


def test_an_outage_is_no_error_for_what_comes_again(store: MemoryStore, told: HealthStore) -> None:
    """Documents are written every few seconds. An incident is not: whoever holds it is reported."""
    store.backend.outage(True)
    told.write(told_by("me"))
    assert told.told() == {}
    told.fold({})
    with pytest.raises(StoreUnavailableError):
        told.write_incident(Incident(wall=WALL, by="me"))


# ---- incidents


def test_two_incidents_in_one_millisecond_are_two(store: MemoryStore, told: HealthStore) -> None:
    for round_ in (1, 2, 3):
        told.write_incident(Incident(wall=WALL, by="me", round=round_))
    told.write_incident(Incident(wall=WALL - 1.0, by="me", round=0))
    assert [incident.round for incident in incidents(store)] == [0, 1, 2, 3]


def test_an_incident_that_may_have_been_written_is_not_written_twice(store: MemoryStore, told: HealthStore) -> None:
    """The answer was lost, or the store went away behind it: it is tried again, and found there."""
    incident = Incident(wall=WALL, by="me", round=1)
    store.backend.lose_replies(1)
    with pytest.raises(OutcomeUnknownError):
        told.write_incident(incident)
    told.write_incident(incident)
    told.write_incident(Incident(wall=WALL, by="other", round=1))
    assert [each.by for each in incidents(store)] == ["me", "other"]


def test_the_newest_thousand_incidents_stay(store: MemoryStore, told: HealthStore) -> None:
    for number in range(INCIDENTS_KEPT + 5):
        put(store, KEYS.incident(number), Incident(wall=0.0, by="x", round=number).encode())
    told.write_incident(Incident(wall=WALL, by="me", round=9999))
    kept = [incident.round for incident in incidents(store)]
    assert kept == [*range(6, INCIDENTS_KEPT + 5), 9999]
    assert len(kept) == INCIDENTS_KEPT
    told.write_incident(Incident(wall=WALL + 1.0, by="me"))
    assert len(incidents(store)) == INCIDENTS_KEPT


# ---- sums of nodes that are gone


def fill(store: MemoryStore, count: int) -> None:
    for number in range(count):
        name = f"n{number}"
        put(store, KEYS.node_health(name), told_by(name, counters={"samples": 1.0, f"only.{name}": 2.0}).encode())


def test_many_are_added_up_and_no_sum_changes(
    store: MemoryStore, told: HealthStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each counter keeps its sum; nodes that are there keep their documents, whoever knows of them. A few documents of
    those that are gone stay: people may want to see them."""
    monkeypatch.setattr(module, "GONE_KEPT", 10)
    fill(store, 10)
    told.fold({})
    assert len(told.told()) == 10
    fill(store, 130)
    put(store, KEYS.node("n7"), b"its leased key")
    before = sums(told)
    told.fold({"n3": object()})
    assert sums(told) == before
    assert set(told.told()) == {GONE, "n3", "n7"}
    fill(store, 12)
    before = sums(told)
    told.fold({})
    assert sums(told) == before
    assert set(told.told()) == {GONE, "n7"}


def test_what_a_node_of_this_name_counted_before_stays(store: MemoryStore, told: HealthStore) -> None:
    """An agent was started again under the name it had: it counts from 0, and its document is written anew."""
    told.write(told_by("me", counters={"samples": 5.0}))
    told.fold({"me": object()})
    told.write(told_by("me", counters={"samples": 1.0}))
    told.fold({"me": object()})
    told.write(told_by("me", counters={"samples": 2.0}))
    assert sums(told) == {"samples": 8.0}


class Late(MemoryStore):
    """Something is written between the reading of what is to be added and the writing of the sum."""

    written = ""

    def transact(self, guards, success, failure=(), *, deadline):  # type: ignore[no-untyped-def]
        if any(isinstance(each, Delete) for each in success):
            other = told_by(self.written, counters={"samples": 100.0})
            put(MemoryStore(self.backend), KEYS.health + self.written, other.encode())
        return super().transact(guards, success, failure, deadline=deadline)


@pytest.mark.parametrize(("written", "samples"), [("n1", 102.0), (GONE, 103.0)])
def test_what_another_node_has_written_meanwhile_is_not_added_twice(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, written: str, samples: float
) -> None:
    """A node has come back, or another one has added up: the documents are others by then, and nothing is written."""
    monkeypatch.setattr(module, "GONE_KEPT", 0)
    fill(store, 3)
    late = Late(store.backend)
    late.written = written
    HealthStore(late, KEYS, "me").fold({})
    told = HealthStore(store, KEYS, "me")
    assert set(told.told()) == {"n0", "n1", "n2", written}
    assert sums(told)["samples"] == samples


def test_a_document_that_nobody_can_read_stops_no_agent(
    store: MemoryStore, told: HealthStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GONE_KEPT", 0)
    fill(store, 2)
    put(store, KEYS.node_health("odd"), b"{}")
    told.fold({})
    assert sums(told)["samples"] == 2.0
    assert store.get(KEYS.node_health("odd"), soon()).first is not None


def test_a_node_that_comes_reads_names_and_not_what_all_have_reported(
    store: MemoryStore, told: HealthStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand nodes come at once, and what they have all reported are megabytes."""
    for name in ("me", "other", "gone"):
        told_there = HealthStore(store, KEYS, name)
        told_there.write(told_by(name))
    read: list[int] = []
    inner = store.range

    def counted(prefix: str, deadline: Deadline, **more: Any) -> Snapshot:
        found = inner(prefix, deadline, **more)
        read.append(sum(len(item.value) for item in found.items))
        return found

    monkeypatch.setattr(store, "range", counted)
    told.fold({"other": None})
    assert read
    assert sum(read) == 0
    assert set(told.told()) == {"other", "gone", GONE}
