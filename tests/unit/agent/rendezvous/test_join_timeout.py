"""JoinTimeout: what counts as waiting for others, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from elastic_trainer.agent.rendezvous.in_place import JoinTimeout
from elastic_trainer.errors import JoinTimeoutError
from elastic_trainer.membership.cluster_view import NodeView, Observation
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.member import Member
from tests.support.memory_backend import ManualClock
from tests.unit.agent.stage import BASE

LIMIT_S = 8.0
READY = BASE.model_copy(update={"state": NodeState.READY})
MEMBER = RoundMember(node="a", create_revision=3, life=1, first_rank=0, local_world_size=1)
NOTHING = Observation(nodes={}, round=None, round_revision=0, connected=True, serial=1)


def seen(state: RoundState, *, lives: bool = True, record: NodeRecord = READY, **more: object) -> Observation:
    """The run with one round of node ``a``."""
    document = RoundDocument(number=4, nonce="x", state=state, members=(MEMBER,)).model_copy(update=more)
    nodes = {"a": NodeView("a", 3, 9, record)} if lives else {}
    return replace(NOTHING, nodes=nodes, round=document, round_revision=9)


class Onlooker:
    """A member in so far as its timeout asks it, and what comes of that."""

    def __init__(self, observation: Observation, shown: NodeRecord | None = READY) -> None:
        self.observation, self.record = observation, shown
        self.clock, self.given_up = ManualClock(), list[JoinTimeoutError]()
        self.timeout = JoinTimeout(cast("Member", self), LIMIT_S, self.given_up.append, self.clock)

    def look(self) -> Observation:
        return self.observation

    def published(self) -> NodeRecord | None:
        return self.record

    def join_timeout(self, join_timeout_s: float) -> JoinTimeoutError:
        return JoinTimeoutError(f"fewer than 2 nodes were ready within {join_timeout_s:g} s")

    def after(self, seconds: float) -> bool:
        """Whether it has given up when ``seconds`` have passed."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end and not self.given_up:
            self.clock.advance(self.timeout.turn())
        return bool(self.given_up)


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
    onlooker = Onlooker(observation)
    assert not onlooker.after(LIMIT_S)
    assert onlooker.after(1.0)


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
    assert not Onlooker(observation, shown).after(4 * LIMIT_S)


def test_the_count_begins_anew_with_each_round() -> None:
    """Only one wait without a break counts."""
    onlooker = Onlooker(NOTHING)
    for _ in range(4):
        assert not onlooker.after(LIMIT_S / 2)
        onlooker.observation = seen(RoundState.ACTIVE)
        assert not onlooker.after(LIMIT_S / 4)
        onlooker.observation = NOTHING
    assert onlooker.after(LIMIT_S + 1.0)
