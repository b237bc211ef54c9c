"""Shard groups of several nodes: which nodes make up groups, and which place a node takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.membership.cluster_view import NodeView, in_groups, living, move, place_of
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.membership.rules import Action

from .scenes import Scene, node, round_of
from .test_rules_in_place import IN_PLACE, free, held, made, names

PAIRS = replace(IN_PLACE, min_nodes=2, max_nodes=6, sizes=(2, 4, 6), shard_nodes=2)


def at(name: str, created: int, **record: Any) -> NodeView:
    """A ready node called after its place: "a0" has place 0."""
    return node(name, created, place=int(name[-1]), **record)


def training(*members: str, **more: Any) -> Scene:
    """A round of these."""
    nodes = [at(name, i + 1, acknowledged=1, reported=1) for i, name in enumerate(members)]
    return Scene(me=members[0], limits=PAIRS).show(*nodes).adopt(round_of(1, nodes, **more))


def broken(*members: str, lost: str = "", **more: Any) -> Scene:
    """It is over, and the members but for ``lost`` are free."""
    scene = training(*members, state=RoundState.BROKEN)
    for name in lost.split():
        scene.lose(name)
    left = [free(name, i + 1, 1, place=int(name[-1]), **more) for i, name in enumerate(members) if name in scene.nodes]
    scene.me = left[0].id
    return scene.show(*left)


def groups(document: RoundDocument | None) -> list[str]:
    found = names(document)
    return [" ".join(pair) for pair in zip(found[::2], found[1::2], strict=True)]


def test_a_node_that_dies_makes_the_other_of_its_group_a_spare() -> None:
    """The other group goes on; the spare takes part in no round until its group has the missing place."""
    formed = made(broken("a0", "a1", "b0", "b1", lost="a1").decide(), Action.FORM)
    assert groups(formed) == ["b0 b1"]
    scene = broken("a0", "a1", "b0", "b1", lost="a1").adopt(formed)
    assert scene.decide(after_s=3600.0).reason == "all is well"
    scene.show(at("x1", 50))
    assert groups(made(scene.decide(after_s=6.0), Action.DRAIN).next) == ["b0 b1", "a0 x1"]


def test_survivors_of_two_broken_groups_are_one_whole_group_at_once() -> None:
    """In the next round, behind the groups that nobody has left."""
    scene = broken("a0", "a1", "b0", "b1", "c0", "c1", lost="a1 b0")
    assert groups(made(scene.decide(), Action.FORM)) == ["c0 c1", "a0 b1"]


def test_too_few_for_a_group_wait_for_the_place_that_is_missing() -> None:
    """Two survivors of one place make no group, and what is missing is said; a newcomer makes one at once."""
    scene = broken("a0", "a1", "b0", "b1", lost="a1 b1")
    assert scene.decide().reason == "0 of at least 2 nodes are ready in whole groups of 2"
    assert groups(made(scene.show(at("x1", 50)).decide(), Action.FORM)) == ["a0 x1"]


def test_a_node_that_leaves_takes_its_group_along_unless_a_spare_has_its_place() -> None:
    """By a planned change: the others switch at one step, and nothing is saved or stopped."""
    for spare, expected in (("x0", ["b0 b1"]), ("x1", ["a0 x1", "b0 b1"])):
        scene = training("a0", "a1", "b0", "b1")
        scene.show(at(spare, 50), at("a1", 2, acknowledged=1, reported=1, state=NodeState.DRAINING))
        assert sorted(groups(made(scene.decide(), Action.DRAIN).next)) == expected


def test_a_node_that_leaves_the_only_group_saves_its_shards_though_a_spare_has_its_place() -> None:
    """The spare has not got them: all save, and the next round resumes that."""
    scene = training("a0", "a1").show(at("b1", 50), at("a1", 2, acknowledged=1, reported=1, state=NodeState.DRAINING))
    draining = made(scene.decide(), Action.DRAIN)
    assert draining.next is None
    scene.adopt(draining).show(free("a0", 1, 1, place=0)).lose("a1")
    assert groups(made(scene.decide(), Action.FORM)) == ["a0 b1"]


def test_the_last_group_that_is_left_by_a_node_saves_before_it_waits() -> None:
    """No whole group is left: there is no next round."""
    scene = training("a0", "a1").show(at("a1", 2, acknowledged=1, reported=1, state=NodeState.DRAINING))
    assert made(scene.decide(), Action.DRAIN).next is None


def test_of_two_groups_the_one_with_the_newest_step_goes_on() -> None:
    """Where only one may."""
    scene = broken("a0", "a1", "b0", "b1")
    scene.limits = replace(PAIRS, max_nodes=2, sizes=(2,))
    scene.show(free("b1", 4, 1, step=8, place=1))
    assert groups(made(scene.decide(), Action.FORM)) == ["b0 b1"]


def test_survivors_in_a_call_take_no_newcomer_into_their_groups() -> None:
    """A spare of theirs waits; without any whole group all do, and then one begins anew."""
    scene = broken("a0", "a1", "b0", "b1", lost="a1", joinable=False).show(at("x1", 50))
    assert groups(made(scene.decide(), Action.FORM)) == ["b0 b1"]
    scene = broken("a0", "a1", lost="a1", joinable=False).show(at("x1", 50))
    assert scene.decide().reason.startswith("the survivors form no whole group")
    found = move(scene.view())
    assert found is not None
    assert (found[0].id, found[1]) == ("a0", 0)


def test_a_first_round_gathers_whole_groups() -> None:
    """Six nodes are two groups and two spares, if they are of one place."""
    scene = Scene(me="a0", limits=PAIRS)
    scene.show(*(at(name, i + 1) for i, name in enumerate(("a0", "b0", "c0", "d0", "a1", "b1"))))
    assert scene.decide(after_s=1.0).reason == "last call for more nodes"
    assert groups(made(scene.decide(after_s=3.0), Action.FORM)) == ["a0 a1", "b0 b1"]


# ---- places


def test_nodes_that_begin_together_come_to_different_places() -> None:
    """All see nobody and take the first place; then each gives way to those that are more senior."""
    nodes = {f"n{i}": node(f"n{i}", i + 1, place=0, state=NodeState.WARMING) for i in range(6)}
    for _ in range(3):
        for name, each in nodes.items():
            record = each.record.model_copy(update={"place": place_of(nodes.values(), name, 3)})
            nodes[name] = replace(each, record=record)
    assert [each.record.place for each in nodes.values()] == [0, 1, 2, 0, 1, 2]


def test_a_node_whose_workers_died_takes_the_place_that_is_missing() -> None:
    """Though it is older than a spare."""
    warming = at("a1", 2, state=NodeState.WARMING)
    assert place_of([at("a0", 1), warming, at("b0", 3), at("b1", 4)], "a1", 2) == 1
    assert place_of([at("b0", 3), at("b1", 4), at("c1", 5)], "x", 2) == 0


def test_a_new_node_takes_the_place_of_one_whose_lease_stands_though_it_is_dead() -> None:
    """Who formed the round has found it dead, and the round says so."""
    scene = training("a0", "a1", ghosts=(at("b1", 3).ghost,)).show(at("b1", 3), at("c0", 4))
    assert place_of(scene.nodes.values(), "x", 2) == 0
    assert place_of(living(scene.view()), "x", 2) == 1


def test_a_spare_without_state_takes_the_missing_place_first() -> None:
    """Then one with the oldest state, but nobody while groups are whole as they are, and nobody who trains."""
    scene = training("a0", "a1").show(at("b0", 3, identity=held(7)), at("c0", 4), at("d0", 5))
    found = move(scene.view())
    assert found is not None
    assert (found[0].id, found[1]) == ("d0", 1)
    scene = training("a0", "a1").show(at("b0", 3, identity=held(9)), at("c0", 4, identity=held(7)))
    found = move(scene.view())
    assert found is not None
    assert (found[0].id, found[1]) == ("c0", 1)
    assert move(training("a0", "a1").show(at("b0", 3)).view()) is None
    assert move(training("a0", "a1", "b0", "b1").view()) is None


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12), st.data())
def test_all_that_can_be_are_in_whole_groups(size: int, places: list[int], data: st.DataObject) -> None:
    """As many groups as the rarest place allows, each with every place once in order; groups that are whole stay."""
    limits = replace(PAIRS, min_nodes=size, max_nodes=12 * size, sizes=(), shard_nodes=size)
    nodes = [node(f"n{i}", i + 1, place=place % size) for i, place in enumerate(places)]
    scene = Scene(me="n0", limits=limits).show(*nodes)
    before = in_groups(scene.view(), nodes) if size > 1 else nodes
    gone = data.draw(st.sets(st.sampled_from([each.id for each in before]))) if before else set()
    scene.adopt(round_of(1, before, RoundState.BROKEN))
    ready = [free(each.id, each.create_revision, 1, place=each.record.place) for each in nodes if each.id not in gone]
    scene.nodes = {each.id: each for each in ready}
    found = in_groups(scene.view(), scene.view().candidates)
    supply = Counter(each.record.place for each in ready)
    assert len(found) == size * min(supply[place] for place in range(size))
    if size > 1:
        assert [each.record.place for each in found] == [i % size for i in range(len(found))]
        was = [[each.id for each in before[i : i + size]] for i in range(0, len(before), size)]
        now = [[each.id for each in found[i : i + size]] for i in range(0, len(found), size)]
        whole = [group for group in was if not gone.intersection(group)]
        assert now[: len(whole)] == whole
