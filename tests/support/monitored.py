"""Runs as the store would hold them, for the tests of the monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import (
    Document,
    Incident,
    JournalEntry,
    NodeHealth,
    NodeRecord,
    NodeState,
    RankHealth,
    RoundDocument,
    RoundMember,
    RoundState,
    Spec,
)
from elastic_trainer.model import Cause
from elastic_trainer.monitor.state import RunDocuments
from elastic_trainer.store.api import Put, RunKeys, Store

PREFIX = "/elastic_trainer"


def soon() -> Deadline:
    """Generous: a slow machine must not fail a test."""
    return Deadline.after(30.0)


def record(size: int = 2, **more: Any) -> NodeRecord:
    values: dict[str, Any] = {"state": NodeState.READY, "life": 1} | more
    return NodeRecord(host="box", address="127.0.0.1", local_world_size=size, store_port=1, probe_port=1, **values)


def rank(number: int, local: int = 0, **more: Any) -> RankHealth:
    values: dict[str, Any] = {
        "pid": 100 + number,
        "phase": "training",
        "phase_s": 3.0,
        "still_s": 0.1,
        "step": 12,
        "step_s": 0.2,
        "compute_s": 0.1,
    }
    return RankHealth(rank=number, local_rank=local, **values | more)


def health(
    node: str, ranks: Sequence[RankHealth] = (), counters: Mapping[str, float] | None = None, **more: Any
) -> NodeHealth:
    return NodeHealth(node=node, wall=1000.0, round=1, ranks=tuple(ranks), counters=counters or {}, **more)


def entry(number: int, state: RoundState = RoundState.ACTIVE, wall: float = 1000.0, **more: Any) -> JournalEntry:
    values: dict[str, Any] = {"by": "n0", "reason": "because", "nodes": ("n0",), "world_size": 2} | more
    return JournalEntry(wall=wall, round=number, state=state, **values)


def incident(number: int, **more: Any) -> Incident:
    """The end of round ``number`` by the loss of a worker."""
    values: dict[str, Any] = {"wall": 1000.0 + number, "cause": Cause.WORKER_LOST, "regroup_s": 0.05, "resume_s": 0.03}
    return Incident(by="n0", round=number, next_round=number + 1, nodes=("n1",), **values | more)


def run(
    count: int = 2,
    size: int = 2,
    *,
    state: RoundState = RoundState.ACTIVE,
    spec: Spec | None = None,
    round_: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunDocuments:
    """A run of ``count`` nodes with ``size`` ranks each in round 1, of which nothing but keys and round is known."""
    views = {f"n{i}": NodeView(f"n{i}", 10 + i, 20 + i, record(size)) for i in range(count)}
    members = tuple(RoundMember(name, views[name].create_revision, 1, size * i, size) for i, name in enumerate(views))
    values: dict[str, Any] = {"number": 1, "nonce": "x", "state": state, "members": members, "reason": "all are there"}
    documents: dict[str, Any] = {
        "run": "r",
        "spec": spec if spec is not None else Spec(min_nodes=1, max_nodes=4),
        "round": RoundDocument(**values | dict(round_ or {})),
        "nodes": views,
    }
    return RunDocuments(**documents | more)


def grouped() -> RunDocuments:
    """Two shard groups of two nodes, n0 to n3, and a spare n4, which has the first place."""
    documents = run(5, 1, spec=Spec(min_nodes=2, max_nodes=4, shard_nodes=2))
    views = {
        name: replace(view, record=view.record.model_copy(update={"shard_slot": i % 2}))
        for i, (name, view) in enumerate(documents.nodes.items())
    }
    assert documents.round is not None
    return replace(
        documents,
        nodes=views,
        round=documents.round.model_copy(update={"members": documents.round.members[:4]}),
    )


class Writer:
    """Writes the documents of a run as its nodes would."""

    def __init__(self, store: Store, name: str = "r", prefix: str = PREFIX) -> None:
        self.store, self.keys = store, RunKeys(prefix, name)

    def put(self, key: str, document: Document | bytes) -> int:
        """Write one key; the revision."""
        value = document if isinstance(document, bytes) else document.encode()
        return self.store.transact([], [Put(key, value)], deadline=soon()).revision

    def round(self, number: int, nodes: Mapping[str, int], state: RoundState = RoundState.ACTIVE, **more: Any) -> None:
        """Commit a round of ``nodes`` (name and ranks of each), with its transition."""
        items = {item.key: item for item in self.store.range(self.keys.nodes, soon()).items}
        members, first = [], 0
        for name, size in nodes.items():
            created = items[self.keys.node(name)].create_revision if self.keys.node(name) in items else 1
            members.append(RoundMember(name, created, 1, first, size))
            first += size
        values: dict[str, Any] = {"number": number, "nonce": f"x{number}", "state": state, "reason": f"reason {number}"}
        document = RoundDocument(members=tuple(members), **values | more)
        told = entry(number, state, 1000.0 + number, nodes=tuple(nodes), world_size=first, reason=document.reason)
        order = list(RoundState).index(state)
        puts = [Put(self.keys.round, document.encode()), Put(self.keys.event(4 * number + order), told.encode())]
        self.store.transact([], puts, deadline=soon())

    def start(self, nodes: int = 2, size: int = 2) -> None:
        """Spec, nodes, and a first round of all of them."""
        self.put(self.keys.spec, Spec(min_nodes=1, max_nodes=4))
        for i in range(nodes):
            self.put(self.keys.node(f"n{i}"), record(size))
        self.round(1, {f"n{i}": size for i in range(nodes)})
