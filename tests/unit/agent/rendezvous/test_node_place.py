"""A spare that looks whether it is needed at another place of a shard group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from elastic_trainer.agent.rendezvous.in_place import LOOK_S, PATIENCE_S, STANDING_S, ShardSlots
from elastic_trainer.agent.workers.conductor import Conductor
from elastic_trainer.agent.workers.periodic import IDLE_S
from elastic_trainer.membership.cluster_view import NodeView, Observation
from elastic_trainer.membership.documents import NodeRecord, RoundState
from elastic_trainer.membership.member import Member
from tests.support.memory_backend import ManualClock
from tests.unit.membership.scenes import round_of
from tests.unit.membership.test_rules_in_place import held
from tests.unit.membership.test_shard_groups import PAIRS, at, training


class Spare:
    """Node b0 beside a round of a0 and a1, and what its agent does."""

    def __init__(self, *others: NodeView, mine: NodeView) -> None:
        self.limits, self.clock, self.begun = PAIRS, ManualClock(), list[str]()
        self.scene = training("a0", "a1").show(mine, *others)
        self.mine: NodeRecord = mine.record
        self.reads, self.dead = 0, set[str]()
        self.place = ShardSlots(cast("Member", self), mine.id, self.nodes, cast("Conductor", self), self.clock)

    def look(self) -> Observation:
        return Observation(nodes={}, round=self.scene.round, round_revision=1, connected=True, serial=1)

    def published(self) -> NodeRecord:
        return self.mine

    def nodes(self) -> dict[str, NodeView]:
        self.reads += 1
        return self.scene.nodes

    def found_dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        return frozenset(self.dead & nodes.keys())

    def restart_workers(self, why: str) -> None:
        self.begun.append(why)

    def after(self, seconds: float) -> list[str]:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(self.place.turn())
        return self.begun


def test_a_spare_without_state_begins_anew_where_it_is_needed() -> None:
    """At its second look: what it saw first may be over."""
    spare = Spare(at("c0", 4, identity=held(7)), mine=at("b0", 3))
    assert spare.after(LOOK_S) == []
    assert spare.after(2 * LOOK_S)[0] == "this spare is needed at place 1 of a shard group"


def test_while_nobody_trains_a_spare_hurries() -> None:
    """The agent of the node at place 1 is dead, and its lease stands: the spare of place 0 takes that place."""
    spare = Spare(mine=at("b0", 3))
    spare.scene.adopt(round_of(2, [at("a0", 1), at("a1", 2)], RoundState.BROKEN))
    assert spare.after(10 * LOOK_S) == []
    spare.dead = {"a1"}
    assert spare.after(STANDING_S) == []
    assert spare.after(2 * STANDING_S)[0] == "this spare is needed at place 1 of a shard group"


def test_a_spare_that_holds_state_waits_for_another_node_first() -> None:
    """Its copy may be the one that the next fault leaves."""
    spare = Spare(at("c0", 4, identity=held(9)), mine=at("b0", 3, identity=held(7)))
    assert spare.after(PATIENCE_S - 2 * LOOK_S) == []
    assert spare.after(4 * LOOK_S) != []


def test_a_spare_stays_where_the_rarest_place_is_another_nodes_business() -> None:
    """That of the node which trains is not asked for, and a node alone cannot make one more group."""
    assert Spare(mine=at("b0", 3)).after(10 * PATIENCE_S) == []
    assert Spare(at("c0", 4), mine=at("b0", 3, identity=held(7))).after(10 * PATIENCE_S) == []


def test_nodes_that_train_or_have_no_places_read_nothing() -> None:
    """Only spares ask the store for all nodes."""
    spare = Spare(mine=at("a0", 1))
    assert spare.after(10 * LOOK_S) == []
    spare.limits = replace(PAIRS, shard_nodes=1)
    assert spare.place.turn() == IDLE_S
    assert spare.reads == 0
