"""JoinTimeout: what counts as waiting for others, and what does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest

from elastic_trainer.agent.rendezvous.join_timeout import JoinTimeout
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import JoinTimeoutError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.view import Observation
from tests.support.crew import LIMIT_S
from tests.unit.agent.channel import BASE

SHORT_S = 0.2
READY = BASE.model_copy(update={"state": NodeState.READY})
MEMBER = RoundMember(node="a", create_revision=3, life=1, first_rank=0, local_world_size=1)
NOTHING = Observation(nodes={}, round=None, round_revision=0, connected=True, serial=1)


def seen(state: RoundState, *, lives: bool = True, record: NodeRecord = READY, **more: object) -> Observation:
    """The run with one round of node ``a``."""
    document = RoundDocument(number=4, nonce="x", state=state, members=(MEMBER,)).model_copy(update=more)
    nodes = {"a": NodeView("a", 3, 9, record)} if lives else {}
    return replace(NOTHING, nodes=nodes, round=document, round_revision=9)


class Onlooker:
    """A member in so far as patience asks it."""

    def __init__(self, observation: Observation, shown: NodeRecord | None) -> None:
        self.observation, self.record = observation, shown

    def look(self) -> Observation:
        return self.observation

    def shown(self) -> NodeRecord | None:
        return self.record

    def join_timeout(self, join_timeout_s: float) -> JoinTimeoutError:
        return JoinTimeoutError(f"fewer than 2 nodes were ready within {join_timeout_s:g} s")


@contextmanager
def patient(observation: Observation, shown: NodeRecord | None = READY) -> Iterator[tuple[Onlooker, threading.Event]]:
    """JoinTimeout with this member; the event is set when it has run out."""
    onlooker, given_up = Onlooker(observation, shown), threading.Event()
    patience = JoinTimeout(cast("Member", onlooker), SHORT_S, lambda _: given_up.set())
    try:
        yield onlooker, given_up
    finally:
        patience.close()


FOLLOWING = RoundDocument(number=5, nonce="y", state=RoundState.ACTIVE, members=(MEMBER,))


@pytest.mark.parametrize(
    "observation",
    [
        NOTHING,
        seen(RoundState.BROKEN),
        seen(RoundState.DRAINING, next=None),
        seen(RoundState.ACTIVE, lives=False),
    ],
    ids=["no round", "broken", "too few left", "all members dead"],
)
def test_a_ready_node_without_a_round_gives_up_in_time(observation: Observation) -> None:
    """Nobody is training, and this node could."""
    began = SYSTEM.monotonic()
    with patient(observation) as (_, given_up):
        assert given_up.wait(LIMIT_S)
        assert SYSTEM.monotonic() - began >= SHORT_S


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        (seen(RoundState.ACTIVE), READY),
        (seen(RoundState.DRAINING, next=FOLLOWING), READY),
        (seen(RoundState.CLOSED), READY),
        (replace(seen(RoundState.BROKEN), connected=False), READY),
        (seen(RoundState.BROKEN, record=READY.model_copy(update={"busy": "in checkpoint"})), READY),
        (NOTHING, BASE),
        (NOTHING, None),
    ],
    ids=[
        "others train",
        "a planned change",
        "closed",
        "no store",
        "a member saves",
        "own workers warm up",
        "not shown",
    ],
)
def test_other_waits_do_not_count(observation: Observation, shown: NodeRecord | None) -> None:
    """Spares wait as long as others train; an outage of the store, and slow workers of its own, end no node."""
    with patient(observation, shown) as (_, given_up):
        assert not given_up.wait(4 * SHORT_S)


def test_the_count_begins_anew_with_each_round() -> None:
    """Only one wait without a break counts."""
    with patient(NOTHING) as (onlooker, given_up):
        for _ in range(4):
            given_up.wait(SHORT_S / 3)
            onlooker.observation = seen(RoundState.ACTIVE)
            assert not given_up.wait(SHORT_S)
            onlooker.observation = NOTHING
        assert given_up.wait(LIMIT_S)


def test_a_closed_one_never_gives_up() -> None:
    """The node has ended meanwhile."""
    with patient(seen(RoundState.ACTIVE)) as (onlooker, given_up):
        pass
    onlooker.observation = NOTHING
    assert not given_up.wait(3 * SHORT_S)
