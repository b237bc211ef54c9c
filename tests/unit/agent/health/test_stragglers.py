"""Slow ranks: named when they stay slow, and let go only where another node is ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from elastic_trainer.agent.health.node_health import LOOK_EVERY_S, LOOKS_IN_A_ROW, Evictions, StragglerWatch
from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import (
    Incident,
    NodeHealth,
    NodeRecord,
    NodeState,
    RankHealth,
    RoundDocument,
    RoundMember,
    RoundState,
)
from elastic_trainer.store.api import Delete, Put, RunKeys
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

KEYS = RunKeys("/p", "run")


def soon() -> Deadline:
    return Deadline.after(60.0)


def rank(number: int, compute_s: float) -> RankHealth:
    place: dict[str, Any] = {"rank": number, "local_rank": 0, "pid": 1}
    return RankHealth(**place, phase="training", phase_s=0.0, still_s=0.0, step=5, step_s=1.0, compute_s=compute_s)


def record(node: str) -> NodeRecord:
    return NodeRecord(
        host=node, address="127.0.0.1", local_world_size=1, store_port=1, probe_port=1, state=NodeState.READY
    )


@dataclass
class Job:
    """Three nodes of one rank each, of which ``slow`` computes ten times as long."""

    slow: str = "c"
    number: int = 1
    records: dict[str, NodeRecord] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=ManualClock)
    store: MemoryStore = field(default_factory=lambda: MemoryStore(MemoryBackend()))
    left: list[str] = field(default_factory=list)
    created: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.created = {name: self.show(name) for name in "abc"}

    def show(self, name: str) -> int:
        """Create the key of node ``name``; its create-revision."""
        key = KEYS.node(name)
        self.store.transact([], [Delete(key)], deadline=soon())
        return self.store.transact([], [Put(key, b"")], deadline=soon()).revision

    def node(self, name: str, *, evicts: bool = True) -> StragglerWatch:
        return StragglerWatch(name, self.evictions(name), lambda: self.records, evicts=evicts, clock=self.clock)

    def evictions(self, name: str) -> Evictions:
        created = self.created[name]
        return Evictions(name, self.store, KEYS, lambda: created, obeys=True, leave=lambda: self.left.append(name))

    def round(self) -> RoundDocument:
        members = tuple(
            RoundMember(node=name, create_revision=self.created[name], life=1, first_rank=at, local_world_size=1)
            for at, name in enumerate("abc")
        )
        return RoundDocument(number=self.number, nonce="n", state=RoundState.ACTIVE, members=members)

    def told(self) -> dict[str, NodeHealth]:
        return {
            name: NodeHealth(
                node=name, wall=1.0, round=self.number, ranks=(rank(at, 1.0 if name == self.slow else 0.1),)
            )
            for at, name in enumerate("abc")
        }

    def looks(self, judge: StragglerWatch, times: int) -> list[Incident | None]:
        found = []
        for _ in range(times):
            self.clock.advance(LOOK_EVERY_S)
            found.append(judge.look(self.round(), self.told))
        return found

    def asked(self, node: str) -> bool:
        return self.store.get(KEYS.eviction(node), soon()).first is not None


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    """Not at the first look of a round, whose figures may be older, and not before it was slow several times."""
    job = Job()
    found = job.looks(job.node("a", evicts=False), 1 + LOOKS_IN_A_ROW + 3)
    at = [index for index, each in enumerate(found) if each is not None]
    assert at == [LOOKS_IN_A_ROW]
    told = found[at[0]]
    assert told is not None
    assert (told.nodes, told.ranks) == (("c",), (2,))


@pytest.mark.parametrize("judge", ["b", "c"])
def test_only_the_node_of_rank_0_judges(judge: str) -> None:
    """One reports, not each."""
    job = Job()
    assert job.looks(job.node(judge), 10) == [None] * 10


def test_nobody_is_asked_to_go_without_a_replacement() -> None:
    """Slow is better than none."""
    job = Job()
    job.looks(job.node("a"), 10)
    assert not job.asked("c")


def test_the_node_of_rank_0_never_asks_itself() -> None:
    """It holds what all meet at."""
    job = Job(slow="a", records={"spare": record("spare")})
    job.looks(job.node("a"), 10)
    assert not job.asked("a")


def test_a_slow_node_goes_where_another_is_ready() -> None:
    """It is asked through its key, and leaves once."""
    job = Job(records={"spare": record("spare")})
    slow = job.evictions("c")
    job.looks(job.node("a"), 1 + LOOKS_IN_A_ROW)
    assert job.asked("c")
    slow.obey()
    slow.obey()
    assert job.left == ["c"]
    assert not job.asked("c")


def test_who_has_come_back_under_the_name_of_a_slow_node_is_not_asked() -> None:
    """Its key is another one. So nor does it hear what was asked of the slow one where etcd writes that late."""
    job = Job(records={"spare": record("spare")})
    job.show("c")
    job.looks(job.node("a"), 1 + LOOKS_IN_A_ROW)
    assert not job.asked("c")


def test_what_was_asked_of_a_node_of_the_same_name_before_is_not_obeyed() -> None:
    """It may have died before it read that; the one that took its name is another, which nobody knows to be slow."""
    job = Job()
    job.store.transact([], [Put(KEYS.eviction("c"), b"slow")], deadline=soon())
    job.created["c"] = job.show("c")
    later = job.evictions("c")
    later.obey()
    later.obey()
    assert job.left == []
    assert not job.asked("c")
