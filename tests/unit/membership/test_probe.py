"""Whose agent is asked for: the nodes that must not be dead for what comes next, and nobody else."""

from __future__ import annotations

from typing import cast

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.core import PROBE_INTERVAL_S, AgentProbes, ChangeWatch, Probed, unconfirmed
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.membership.member import Member, Presence
from elastic_trainer.store.api import RunKeys
from tests.support.memory_store import MemoryStore
from tests.support.threadless import no_new_threads
from tests.unit.membership.scenes import Scene, node, round_of

KEYS = RunKeys("/p", "run")
TRIO = [node("a", 1), node("b", 2), node("c", 3)]


class Named:
    """What a member's thread asks of its presence."""

    node_id, ttl_s, address = "a", 10.0, "10.0.0.1"


def asked(scene: Scene) -> list[str]:
    """The names of those in doubt."""
    return [each.id for each in unconfirmed(scene.view())]


def scene_of(state: RoundState, *more: NodeView) -> Scene:
    """Three members as ``a`` sees them, and others."""
    return Scene().show(*TRIO, *more).adopt(round_of(1, TRIO, state))


def test_members_of_a_round_that_is_over_are_asked_for_until_they_have_spoken() -> None:
    """Whoever has acknowledged its end is there; this node need not ask for itself."""
    scene = scene_of(RoundState.BROKEN)
    assert asked(scene) == ["b", "c"]
    assert asked(scene.show(node("c", 3, acknowledged=2))) == ["b"]


@pytest.mark.parametrize(("newcomers", "expected"), [("x", ["x"]), ("xy", ["x"]), ("", [])])
def test_newcomers_are_asked_for_where_there_is_room(newcomers: str, expected: list[str]) -> None:
    """Four nodes at most, three of them are members: one is about to be taken in, the others are spares."""
    assert asked(scene_of(RoundState.ACTIVE, *(node(name, 50 + at) for at, name in enumerate(newcomers)))) == expected


def test_newcomers_of_a_planned_change_are_asked_for() -> None:
    """Members that have said that they switch are not."""
    following = round_of(2, [*TRIO, node("x", 50)])
    scene = Scene().show(*TRIO, node("x", 50), node("y", 51))
    scene.adopt(round_of(1, TRIO, RoundState.DRAINING, next=following)).show(node("b", 2, acknowledged=2))
    assert asked(scene) == ["c", "x"]


def test_nobody_is_asked_for_when_the_run_is_closed_or_has_not_begun() -> None:
    """And nobody is known to be dead who has changed its key since: that is another life."""
    assert asked(scene_of(RoundState.CLOSED)) == asked(Scene().show(*TRIO)) == []
    scene, probes = scene_of(RoundState.BROKEN), AgentProbes()
    probe, _ = probes.turn(scene.view(), 1.0)
    assert probe is not None
    assert [each.id for each in probe.nodes] == ["b", "c"]
    assert probes.turn(scene.view(), 1.0 + PROBE_INTERVAL_S / 2) == (None, PROBE_INTERVAL_S), "asked again too soon"
    probes.on_probed(Probed("b", 2, dead=True))
    probes.on_probed(Probed("c", 3, dead=False))
    assert probes.dead(scene.nodes) == {"b"}
    assert probes.dead({name: node(name, 1, mod=99) for name in "bc"}) == frozenset()


def test_probes_go_on_after_many_that_could_not_be_started() -> None:
    """No thread can be started for them, nor for the watch that the same step changes: they prove nothing."""
    scene, now = scene_of(RoundState.BROKEN), 1.0
    member = Member(MemoryStore(), KEYS, cast("Presence", Named()), scene.limits, lambda error: None)
    probes = AgentProbes()
    for _ in range(40):
        probe, _ = probes.turn(scene.view(), now)
        assert probe is not None
        with no_new_threads():
            member._perform(ChangeWatch(nodes=True, reason="it is among the most senior"))
            member._perform(probe)
        for answer in member._take_answers():
            if isinstance(answer, Probed):
                probes.on_probed(answer)
        now += 1.0
    assert probes.dead(scene.nodes) == frozenset()
