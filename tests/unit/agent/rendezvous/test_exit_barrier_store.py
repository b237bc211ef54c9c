"""The store that torchrun's agent gets: its own code reads the same ranks from it as from a shared store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker, WorkerSpec
from torch.distributed.elastic.utils.store import barrier

from elastic_trainer.agent.rendezvous.launcher import RoundStore
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState

Node = tuple[str, int]
"""Role and number of workers."""


def document_of(nodes: list[Node]) -> RoundDocument:
    members, first = [], 0
    for index, (role, size) in enumerate(nodes):
        members.append(
            RoundMember(
                node=f"n{index}", create_revision=index + 1, life=1, first_rank=first, local_world_size=size, role=role
            )
        )
        first += size
    return RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=tuple(members))


def never(_: float) -> None:
    raise AssertionError("the run has not ended")


def ranks(store: Any, index: int, nodes: list[Node]) -> list[tuple[int, ...]]:
    """What torchrun makes of ``store`` for the workers of one node."""
    role, size = nodes[index]
    spec = WorkerSpec(role=role, local_world_size=size, rdzv_handler=None, entrypoint="none")  # type: ignore[arg-type]
    assign: Any = SimpleElasticAgent._assign_worker_ranks
    workers: list[Worker] = assign(None, store, index, len(nodes), spec)
    return [(w.local_rank, w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in workers]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["default", "reader"]), st.integers(1, 8)), min_size=1, max_size=6))
def test_torchrun_reads_the_ranks_of_the_round_document(nodes: list[Node]) -> None:
    """Mixed roles, unequal nodes, nobody asked: each worker has its place in the world, and among those of its role."""
    document = document_of(nodes)
    roles = [role for role, size in nodes for _ in range(size)]
    for index, member in enumerate(document.members):
        first, role = member.first_rank, member.role
        before, alike = roles[:first].count(role), roles.count(role)
        expected = [(i, first + i, len(roles), before + i, alike) for i in range(member.local_world_size)]
        assert ranks(RoundStore(document, never), index, nodes) == expected


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_exit_barrier_waits_for_the_end_of_the_run(size: int) -> None:
    """torchrun's barrier calls ``finish`` once, with its own limit, whatever the number of nodes."""
    waited: list[float] = []
    store: Any = RoundStore(document_of([("default", 1)] * size), waited.append)
    barrier(store, world_size=size, key_prefix="torchelastic/agent/terminal_state", barrier_timeout=123)
    assert waited == [123.0]
    assert store.timeout == timedelta(seconds=300)


def test_what_torchrun_does_not_ask_for_today_is_an_error_with_the_key() -> None:
    """A torch that asks for something new fails by name, not by waiting for ever."""
    store = RoundStore(document_of([("default", 1)]), never)
    with pytest.raises(KeyError, match="torchelastic/something_new"):
        store.get("torchelastic/something_new")


def test_values_that_were_written_are_read_back() -> None:
    """Several at once, text or bytes, and counters."""
    store = RoundStore(document_of([("default", 1)]), never)
    store.multi_set(["a", "b"], ["text", b"bytes"])
    assert store.multi_get(["a", "b"]) == [b"text", b"bytes"]
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    store.wait(["a"])
