"""The membership rules of in-place recovery, clause by clause; nodes that cannot reach each other; shard groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.ipc.channel import Identity
from elastic_trainer.membership.cluster_view import NodeView, in_groups, move, slot_of
from elastic_trainer.membership.documents import NodeState, RoundState, RunResult
from elastic_trainer.membership.rules import (
    FAILED_ROUNDS,
    UNFORMED_ROUNDS,
    Action,
    blamed,
    broken,
    cannot_reach,
    left_out,
)
from elastic_trainer.model import Cause, RecoveryMode
from tests.unit.membership.scenes import LIMITS, Scene, made, names, node, round_of

IN_PLACE = replace(
    LIMITS, recovery=RecoveryMode.IN_PLACE, regroup_grace_s=0.5, report_floor_s=10.0, failure_limit=3, stalled_rounds=4
)
ALONE = replace(IN_PLACE, min_nodes=1)
BROKEN = RoundState.BROKEN


def held(step: int, round: int = 1, **more: Any) -> Identity:
    return Identity(round=round, step=step, **more)


def free(name: str, created: int, number: int, step: int = 7, **record: Any) -> NodeView:
    """A survivor whose workers have left round ``number``, with their state."""
    values: dict[str, Any] = {"acknowledged": number + 1, "reported": number + 1, "identity": held(step)} | record
    return node(name, created, mod=100 + created, **values)


def acknowledged(name: str, created: int, number: int, **record: Any) -> NodeView:
    """A survivor whose agent knows that round ``number`` is over, and whose workers are not free yet."""
    return node(name, created, mod=100 + created, **({"acknowledged": number + 1, "reported": number} | record))


def ended(name: str, created: int, number: int, life: int = 2, **record: Any) -> NodeView:
    """A node whose workers have died in round ``number`` and are being started again."""
    values: dict[str, Any] = {"state": NodeState.WARMING, "life": life, "acknowledged": number + 1, "planned": False}
    values["ended_by"] = Cause.WORKER_LOST
    return node(name, created, mod=100 + created, **(values | {"cause": "its worker 0 was lost"} | record))


def leaving(name: str, created: int) -> NodeView:
    """A member of round 1 that was asked to go."""
    return node(name, created, mod=9, acknowledged=1, reported=1, state=NodeState.DRAINING)


def frees(number: int, members: str = "abc", **record: Any) -> list[NodeView]:
    """These of ``abc`` are free after round ``number``."""
    return [free(name, "abc".index(name) + 1, number, **record) for name in members]


def trio(state: RoundState = RoundState.ACTIVE, number: int = 1, members: str = "abc", **more: Any) -> Scene:
    """Round ``number`` of a, b and c."""
    nodes = [node(name, "abc".index(name) + 1, acknowledged=number, reported=number) for name in members]
    return Scene(limits=IN_PLACE).show(*nodes).adopt(round_of(number, nodes, state, **more))


# ---- planned changes


def drained() -> Scene:
    """A newcomer x is being taken in."""
    scene = trio().show(node("x", 50))
    scene.decide()
    assert scene.follow(after_s=6.0) == "drain to a b c x: node x joins"
    return scene


def test_a_planned_change_carries_the_complete_next_round() -> None:
    """So the workers can switch without etcd: number, ranks, store and nonce are known before. The switch is complete
    when all that stay have reported (newcomers are free anyway); the round then formed is the one announced."""
    scene = drained()
    assert scene.round is not None
    following = scene.round.next
    assert following is not None
    assert (scene.round.number, following.number, following.nonce) == (1, 2, "fresh")
    assert (following.state, following.store) == (RoundState.ACTIVE, "127.0.0.1:1001")
    assert [member.first_rank for member in following.members] == [0, 1, 2, 3]
    scene.show(*frees(1, "ab", planned=True))
    assert scene.said(after_s=3600.0) == "waiting for c to reach the agreed step"
    assert scene.show(*frees(1, "c", planned=True)).forms() == following


def test_who_is_lost_while_a_planned_change_is_under_way_breaks_it() -> None:
    """Some ranks may have switched: the round that is broken is the next one, with its members. A newcomer whose
    agent's port refuses connections is needed by that round as a member is. One that dies before is not taken in."""
    for dead in ("x", "c"):
        scene = drained()
        scene.suspects = frozenset({dead})
        assert scene.said() == f"break 2: node {dead} is gone"
    assert drained().lose("x").said() == "break 2: node x is gone"
    scene = drained().show(ended("b", 2, 1))
    assert scene.follow() == "break 2: node b left the round: its worker 0 was lost"
    assert scene.round is not None
    assert (scene.round.state, scene.round.next, names(scene.round)) == (BROKEN, None, "a b c x")
    scene.show(*frees(1, "ac", planned=True))
    assert scene.decide(after_s=0.4).action is Action.WAIT, "who has switched has reported the round that is broken"
    assert scene.show(*frees(2, "ac"), free("x", 50, 2)).said() == "form 3: a c x"
    scene = trio().show(node("x", 50))
    scene.decide()
    scene.suspects = frozenset({"x"})
    assert scene.said(after_s=6.0) == "all is well"


def test_a_leaving_node_is_not_in_the_next_round_and_not_waited_for() -> None:
    """Ranks close up behind it; the others switch without asking it, also if it is lost. A newcomer takes its place at
    once, by the same change."""
    for lost in (False, True):
        scene = trio().show(leaving("a", 1))
        assert scene.follow() == "drain to b c: node a leaves"
        if lost:
            scene.me = "b"
            assert scene.lose("a").said(after_s=1.0) == "waiting for b, c to reach the agreed step"
        assert scene.show(*frees(1, "bc", planned=True)).said(after_s=1.0) == "form 2: b c"
    assert trio().show(node("x", 50), leaving("b", 2)).said() == "drain to a c x: node b leaves; node x joins"


def test_a_planned_change_after_which_nobody_holds_the_state_goes_through_storage() -> None:
    """Too few would be left, or all members leave while others stand ready: without a next round they save a checkpoint
    before they go. The agreed step and the checkpoint may take long; no grace cuts them short."""
    scene = trio(members="ab").show(leaving("b", 2))
    assert scene.follow() == "drain: node b leaves"
    assert scene.show(node("x", 50)).said(after_s=3600.0) == "waiting for a, b to be free"
    assert scene.show(*frees(1, "a", planned=True)).said(after_s=3600.0) == "waiting for b to be free"
    assert scene.lose("b").said() == "form 2: a x"
    scene = trio(members="a").show(leaving("a", 1), node("x", 50))
    scene.limits = replace(ALONE, max_nodes=1)
    assert scene.follow() == "drain: node a leaves; node x joins"
    assert scene.decide(after_s=60.0).action is Action.WAIT
    assert scene.show(*frees(1, "a", state=NodeState.DRAINING, planned=True)).said() == "form 2: x"


# ---- failures


def test_survivors_go_on_as_soon_as_all_are_free() -> None:
    """Nothing is waited for: the lost node's workers come back later, by a planned change. Its agent may be dead: its
    port refuses connections. Newcomers replace lost nodes at once, no more than were lost."""
    scene = trio(BROKEN, worker_failed=True).show(*frees(1, "ac"), ended("b", 2, 1))
    formed = scene.forms()
    assert (names(formed), formed.number, formed.ghosts) == ("a c", 2, ())
    scene = trio(BROKEN).show(*frees(1, "ac"))
    scene.suspects = frozenset({"b"})
    assert scene.said() == "form 2: a c"
    assert trio(BROKEN).show(*frees(1), node("x", 50)).said() == "form 2: a b c"
    assert trio(BROKEN).show(*frees(1, "ac"), node("x", 50), node("y", 51)).lose("b").said() == "form 2: a c x"


def test_a_node_that_does_not_acknowledge_is_left_out_after_the_grace() -> None:
    """It may be dead or cut off. Its key counts for nothing until it changes; then it is a newcomer like any other."""
    scene = trio(BROKEN).show(*frees(1, "ac"))
    waiting = scene.decide(after_s=0.4)
    assert waiting.reason == "waiting for b to be free"
    assert waiting.again_in_s == pytest.approx(0.1)
    formed = scene.forms(after_s=0.2)
    assert (names(formed), formed.ghosts, formed.reason) == ("a c", (node("b", 2).ghost,), "node b was lost")
    pair = [node("a", 1, acknowledged=2, reported=2), node("c", 3, acknowledged=2, reported=2)]
    scene = Scene(limits=IN_PLACE).show(*pair, node("b", 2)).adopt(round_of(2, pair, ghosts=formed.ghosts))
    assert scene.said(after_s=60.0) == "all is well"
    scene.show(*frees(1, "b", planned=True)).decide()
    assert scene.said(after_s=6.0) == "drain to a c b: node b joins"


def test_what_a_restored_backup_says_of_a_node_is_not_believed() -> None:
    """The round means its third life, its key shows the first: it is waited for until it has said what it is now, and
    neither taken in as it was then nor reported as one that has left."""
    standing = round_of(5, [node("a", 1), node("b", 2, life=3)])
    scene = Scene(limits=IN_PLACE).show(node("a", 1, acknowledged=5, reported=5), node("b", 2, mod=3)).adopt(standing)
    assert scene.decide().action is Action.WAIT
    scene.adopt(standing.model_copy(update={"state": BROKEN})).show(free("a", 1, 5))
    assert scene.said() == "waiting for b to be free"
    assert scene.show(free("b", 2, 5, life=3)).said() == "form 6: a b"


def test_a_node_that_has_acknowledged_gets_time_for_its_step_and_a_busy_one_all_it_needs() -> None:
    """Twice its step time, at least the floor: the agent lives, its workers are in the middle of something. If they
    save, say, their own agent sees that it does not last."""
    for step_time_s, bound_s in ((0.1, 10.0), (20.0, 40.0)):
        scene = trio(BROKEN).show(*frees(1, "ac"), acknowledged("b", 2, 1, step_time_s=step_time_s))
        assert scene.said(after_s=bound_s - 0.1) == "waiting for b to be free"
        assert scene.said(after_s=0.2) == "form 2: a c"
    scene = trio(BROKEN).show(*frees(1, "ac"), acknowledged("b", 2, 1, busy="in checkpoint"))
    assert scene.said(after_s=3600.0) == "waiting for b (in checkpoint) to be free"
    assert scene.show(*frees(1, "b")).said() == "form 2: a b c"


def test_nobody_goes_on_without_the_only_ones_that_hold_the_state() -> None:
    """A worker that was started again is ready before any survivor is: it would begin at the last checkpoint. Nor
    without the one that has committed a step more than those that are free, nor, while its key stands, without a silent
    one: its agent may be slow to hear of the end; if it is dead its port or its lease shows it."""
    again = [free(name, i, 1, life=2, identity=None) for name, i in (("a", 1), ("c", 3))]
    for last in (acknowledged("b", 2, 1), node("b", 2)):
        scene = trio(BROKEN).show(*again, last)
        assert scene.said(after_s=60.0) == "waiting for b to be free"
    assert scene.lose("b").said() == "form 2: a c"
    scene = trio(BROKEN).show(*frees(1, "ac"), acknowledged("b", 2, 1, committed=8))
    assert scene.said(after_s=60.0) == "waiting for b to be free"
    assert scene.show(acknowledged("b", 2, 1, committed=7)).said() == "form 2: a c"


def bereft(*, joinable: bool) -> Scene:
    """a is left of a round of three, which is the least there may be."""
    scene = Scene(limits=replace(IN_PLACE, min_nodes=3)).show(free("a", 1, 1, joinable=joinable))
    return scene.adopt(round_of(1, [node("a", 1), node("b", 2), node("c", 3)], BROKEN))


def test_newcomers_complete_survivors_who_are_too_few() -> None:
    """Those who are in an evaluation complete that by themselves first, once enough are there, and the others come by a
    planned change at once: in the evaluation all would wait for each other."""
    for joinable in (True, False):
        scene = bereft(joinable=joinable)
        assert scene.said(after_s=3600.0) == "1 of at least 3 nodes are ready"
        scene.show(node("x", 50), node("y", 51))
        assert scene.follow() == ("form 2: a x y" if joinable else "form 2: a")
    scene.show(free("a", 1, 1, joinable=False)).decide()
    assert scene.said() == "drain to a x y: nodes x, y join"


def test_survivors_in_the_middle_of_a_call_go_on_alone() -> None:
    """A spare could not follow them there. Nor could a newcomer of a planned change that broke before anybody had made
    it, which is not lost either. But who is still behind its step is needed where all others are in no call."""
    scene = trio(BROKEN).show(free("a", 1, 1, joinable=False), *frees(1, "c"), node("x", 50)).lose("b")
    assert scene.said() == "form 2: a c"
    scene = drained().show(ended("b", 2, 1), *frees(2, "ac", joinable=False))
    scene.follow()
    following = scene.show(node("x", 50, acknowledged=3, reported=3, newcomer=True)).forms()
    assert names(following) == "a c"
    assert "x" not in following.reason
    scene = bereft(joinable=False).show(free("a", 1, 1, joinable=False, met=("one",)), *frees(1, "bc", met=("two",)))
    assert scene.said() == "form 2: a b c"
    both, before = ("two", "one"), ("one", "none")
    scene = trio(BROKEN).show(node("x", 50), *frees(1, "ab", joinable=False, met=both))
    scene.show(free("c", 3, 1, joinable=False, met=before))
    assert scene.said() == "form 2: a b c", "the round before it ended while its ranks came to one state"


def test_finishing_members_are_no_candidates_and_end_the_run() -> None:
    """The training is over for them: no round is formed of them, whatever becomes of the others."""
    scene = trio(BROKEN).show(*frees(1, state=NodeState.FINISHING))
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    assert made(scene.show(*frees(1, state=NodeState.DONE)).decide(), Action.CLOSE).result is RunResult.SUCCEEDED


# ---- giving up


def fail(scene: Scene, number: int, step: int | None, victim: str = "", **state: Any) -> str:
    """Round ``number`` breaks at ``step``, because a worker of ``victim`` failed; what the survivors decide."""
    assert scene.round is not None
    update = {"state": BROKEN, "worker_failed": bool(victim), "reason": "broken"}
    scene.adopt(scene.round.model_copy(update=update))
    lives = {member.node: member.life for member in scene.round.members}
    for i, name in enumerate("abc"):
        life, identity = lives.get(name, 1), held(step, number, **state) if step is not None else None
        again = ended(name, i + 1, number, life=life + 1)
        scene.show(again if name == victim else free(name, i + 1, number, life=life, identity=identity))
    return scene.follow()


def rejoin(scene: Scene, number: int) -> None:
    """All three are in round ``number`` again, as after a planned change that nothing happened in."""
    assert scene.round is not None
    nodes = [
        node(name, i + 1, life=scene.nodes[name].record.life, acknowledged=number, reported=number)
        for i, name in enumerate("abc")
    ]
    carried = {name: getattr(scene.round, name) for name in ("last_step", "failures", "stalled")}
    scene.show(*nodes).adopt(round_of(number, nodes, **carried))


def test_failures_at_one_step_are_counted_over_nodes_and_end_the_run() -> None:
    """A poison batch kills one node after another: the third failure closes, naming the step and the samples. A step
    committed in between starts the count anew: faults that let the job come on never end it."""
    scene, position = trio(), {"epoch": 2, "samples": 96, "batch": 32}
    for number, victim in ((1, "b"), (3, "c")):
        assert fail(scene, number, 40, victim, **position).startswith("form")
        rejoin(scene, number + 2)
    expected = "3 worker failures after step 40, without a step committed since (epoch 2, samples 96 to 127 of its"
    assert fail(scene, 5, 40, "a", **position).startswith(f"close failed: {expected}")
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    scene = trio()
    for turn in range(6):
        assert fail(scene, 1 + 2 * turn, 40 + turn, "abc"[turn % 3]).startswith("form")
        assert scene.round is not None
        assert scene.round.failures == 1
        rejoin(scene, 3 + 2 * turn)


def test_what_is_no_failure_of_a_worker_does_not_count_and_begins_no_count_anew() -> None:
    """A planned change, and nodes that are lost. A worker that died counts also if a peer's failed collective was
    reported first: the lost life shows who failed."""
    scene = trio(last_step=40, failures=2, stalled=3).show(node("x", 50))
    scene.decide()
    following = made(scene.decide(after_s=6.0), Action.DRAIN).next
    assert following is not None
    assert (following.last_step, following.failures, following.stalled) == (40, 2, 3)
    assert trio(BROKEN).show(*frees(1, "ac")).lose("b").forms().failures == 0
    assert trio(BROKEN, worker_failed=False).show(*frees(1, "ac"), ended("b", 2, 1)).forms().failures == 1


@pytest.mark.parametrize(
    ("step", "said"), [(0, "after step 0, without a step committed since"), (None, "before the first step")]
)
def test_rounds_without_a_committed_step_end_the_run(step: int | None, said: str) -> None:
    """Nobody dies and yet nothing moves: collectives that never work, say, or nodes that cannot reach each other's
    stores, and never hold a state."""
    scene = trio()
    for number in range(1, 5 if step is not None else 4):
        assert fail(scene, number, step) == f"form {number + 1}: a b c"
    assert fail(scene, number + 1, step).startswith(f"close failed: 4 consecutive rounds ended {said}")


def test_failures_are_counted_where_nobody_survives_as_well() -> None:
    """A single node that dies at one point, restored from one checkpoint each time: its agent knows how far it came.
    One that comes on between its failures is not given up."""

    def alone(number: int, last_step: int | None, failures: int, reached: int) -> Scene:
        before = node("a", 1, life=number)
        again = free("a", 1, number, life=number + 1, identity=None, reached=held(reached))
        counts = {"last_step": last_step, "failures": failures, "worker_failed": True}
        return Scene(limits=ALONE).show(again).adopt(round_of(number, [before], BROKEN, **counts))

    for case, expected in (((1, None, 0, 5), (5, 1)), ((2, 5, 1, 4), (5, 2)), ((3, 1000, 2, 9000), (9000, 1))):
        formed = alone(*case).forms()
        assert (formed.last_step, formed.failures) == expected
    assert alone(3, 5, 2, 5).said().startswith("close failed: 3 worker failures after step 5")


def test_scripts_of_restart_mode_are_not_given_up() -> None:
    """How far they have come is not known, so no number of restarts proves anything."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*(free(n.id, n.create_revision, 1, life=2, identity=None, planned=True) for n in nodes))
    assert scene.adopt(round_of(1, nodes, BROKEN, failures=99, stalled=99)).decide().action is Action.FORM


# ---- members that do not reach each other


def unreached(number: int = 4, c: tuple[str, ...] = (), *, least: int = 2, **counts: Any) -> Scene:
    """Round ``number`` is over, a could not reach c."""
    scene = trio(BROKEN, number, last_step=7, **counts)
    scene.limits = replace(IN_PLACE, min_nodes=least)
    return scene.show(*frees(number, "a", unreachable=("c",)), *frees(number, "b"), *frees(number, "c", unreachable=c))


def chosen(scene: Scene) -> tuple[str, str | None]:
    """The members of the next round, and whom it leaves out."""
    formed = scene.forms()
    return names(formed), formed.left_out


def test_after_two_rounds_in_vain_the_unreachable_node_is_left_out_and_named() -> None:
    """The round without it says so; while only one round has failed all are in the next. A step committed since makes
    old complaints void: who was unreachable before may be reachable now."""
    again = unreached(3, stalled=0).forms()
    assert (names(again), again.left_out, again.stalled) == ("a b c", None, 1)
    without = unreached(c=("a",), stalled=1).forms()
    assert (names(without), without.left_out, without.stalled) == ("a b", "c", 2)
    assert without.reason.startswith("node c is excluded, which others cannot reach")
    assert without.ghosts == ()  # it may come back
    scene = unreached(stalled=1).show(*frees(4, "ab", step=8, unreachable=("c",)))
    assert scene.said() == "form 5: a b c"


def test_a_run_is_not_closed_while_fewer_nodes_can_train() -> None:
    """The limit of rounds in vain is reached, and a node is named: the others go on, and their count begins anew, once
    for each smaller size until a step is committed. Where no smaller round may train the run is closed; and a poison
    batch is not excused by a bad network."""
    for least, fewest, expected in ((2, 0, ("a b", "c", 0, 2)), (1, 2, ("a", "c", 0, 1))):
        without = unreached(least=least, stalled=3, fewest=fewest).forms()
        assert (names(without), without.left_out, without.stalled, without.fewest) == expected
    scene = trio(BROKEN, 4, last_step=7, stalled=3, fewest=1).show(*frees(4, step=8))
    again = scene.forms()
    assert (names(again), again.stalled, again.fewest) == ("a b c", 0, 3)
    given_up = "close failed: 4 consecutive rounds ended after step 7"
    assert unreached(least=3, stalled=3, unformed=9).said().startswith(given_up)
    poisoned = unreached(stalled=1, failures=2, worker_failed=True)
    assert poisoned.said().startswith("close failed: 3 worker failures after step 7")


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("away", [0, 1, 7, None])
def test_a_run_ends_where_no_worker_reaches_another(count: int, named: bool, away: int | None) -> None:
    """Whether nodes name each other or nobody, and whenever those left out come back: after ``away`` rounds or never.
    Each count that begins anew does so with fewer nodes than any round before, so there are not many."""
    limits = replace(ALONE, max_nodes=count)
    everybody = [f"n{each:02}" for each in range(count)]
    scene = Scene(me="n00", limits=limits).adopt(round_of(1, [node(each, i + 1) for i, each in enumerate(everybody)]))
    back = dict.fromkeys(everybody, 0)
    for number in range(1, count * limits.stalled_rounds + 1):
        assert scene.round is not None
        inside = names(scene.round).split()
        scene.adopt(broken(scene.round, "no contact", cause=Cause.CONTACT_LOST, unformed=True))
        for i, each in enumerate(everybody):
            unreachable = [other for other in inside if other != each][:1] if named and each in inside else []
            record: dict[str, Any] = {"identity": None, "newcomer": True, "unreachable": tuple(unreachable)}
            if back[each] > number:
                record["state"] = NodeState.WARMING
            scene.show(free(each, i + 1, number, **record))
        decision = scene.decide(after_s=60.0)
        if decision.action is Action.CLOSE:
            assert decision.reason.startswith(f"{limits.stalled_rounds} consecutive rounds ended before the first step")
            return
        formed = made(decision, Action.FORM)
        if formed.left_out is not None:
            back[formed.left_out] = number + 1 + (away if away is not None else 10**6)
        scene.adopt(formed)
    raise AssertionError(f"open after {count * limits.stalled_rounds} rounds")


WHY = "workers of node a publish 127.0.0.1"


def test_whoever_is_left_out_the_reason_says_why() -> None:
    """On trial, if rounds do not form and nobody is named: the last to come. A node that names itself, though it came
    first, by its own cause. Not the only one with the training state: the others would begin again at the newest
    checkpoint, or at step 0."""
    without = trio(BROKEN, 4, last_step=7, stalled=2, unformed=UNFORMED_ROUNDS).show(*frees(4)).forms()
    assert (names(without), without.left_out, without.unformed) == ("a b", "c", UNFORMED_ROUNDS)
    said = "node c, which joined last, is left out on trial: 4 rounds in a row did not form and no node is named: "
    assert without.reason.startswith(said)
    itself = free("a", 1, 4, unreachable=("a",), cause=WHY)
    without = unreached(c=("b",), stalled=1).show(itself).forms()
    assert (names(without), without.left_out) == ("b c", "a")
    assert without.reason.startswith(f"node a is excluded, as {WHY}: ")
    scene = unreached(least=1, stalled=1).show(itself, *frees(4, "bc", identity=None, newcomer=True))
    without = scene.forms()
    assert (names(without), without.left_out) == ("a b", "c")
    said = f"node c is excluded, instead of node a, which alone holds the training state, as {WHY}: "
    assert without.reason.startswith(said)


def test_only_who_was_in_the_rounds_that_failed_is_left_out() -> None:
    """Neither a newcomer that waits nor one that replaces a lost node: they were not tried. They take its place, though
    no fewer nodes may train; but not in a call, where no newcomer could."""
    for members, expected in (("abc", ("a b x", "c")), ("ac", ("a x", "c"))):
        scene = trio(BROKEN, 5, last_step=7, stalled=2, unformed=5).show(*frees(5, members), node("x", 50))
        if "b" not in members:
            scene.lose("b")
        assert chosen(scene) == expected
    pair = trio(BROKEN, 5, "ab", last_step=7, stalled=2, unformed=5).show(*frees(5, "ab"), node("c", 50))
    pair.limits = replace(IN_PLACE, max_nodes=2)
    assert chosen(pair) == ("a c", "b")
    pair.limits = IN_PLACE
    assert chosen(pair.show(*frees(5, "ab", joinable=False, unreachable=("b",)))) == ("a b", None)


def test_only_rounds_in_a_row_that_did_not_form_count() -> None:
    nodes = [node(name, i + 1) for i, name in enumerate("ab")]
    first = broken(round_of(1, nodes), "no contact", cause=Cause.CONTACT_LOST, unformed=True)
    second = broken(round_of(2, nodes, unformed=first.unformed), "no contact", unformed=True)
    assert (first.unformed, second.unformed) == (1, 2)
    assert broken(round_of(3, nodes, unformed=2), "a node was lost").unformed == 0


def test_two_that_are_both_needed_wait_until_they_reach_each_other() -> None:
    """Rounds in vain would end the run: a network that fails for a minute must not. A newcomer takes the place of one
    of them, though that is a survivor."""
    scene = trio(BROKEN, 3, "ac").show(*frees(3, "a", unreachable=("c",)), *frees(3, "c", unreachable=("a",)))
    assert scene.said(after_s=3600.0) == "nodes a and c cannot reach each other, and both are needed"
    assert chosen(scene.show(node("x", 50))) == ("a x", "c")
    assert scene.lose("x").show(*frees(3, "c")).said() == "form 4: a c"


# ---- members that do not answer


def suspected(*more: NodeView) -> Scene:
    """Round 3 of a, b and c was broken since c did not answer; ``a`` and ``b`` are free."""
    scene = trio(BROKEN, 3, ghosts=(node("c", 3).ghost,), cause=Cause.CONTACT_LOST)
    return scene.show(*frees(3, "ab"), *more)


def test_who_does_not_answer_is_not_waited_for() -> None:
    """Its lease stands. It gets a moment to show that it lives, and the next round is formed without it; also where it
    is the decider, whom the next in line passes by."""
    scene = suspected()
    assert scene.said() == "waiting for c to be free"
    formed = scene.forms(after_s=2 * IN_PLACE.suspect_grace_s)
    assert (names(formed), formed.reason, formed.cause) == ("a b", "node c was lost", Cause.NODE_LOST)
    assert formed.ghosts == (node("c", 3).ghost,)
    scene = trio(BROKEN, 3, ghosts=(node("a", 1).ghost,)).show(*frees(3, "bc"))
    scene.me = "b"
    assert scene.said(after_s=2 * IN_PLACE.suspect_grace_s) == "form 4: b c"


def test_who_does_not_answer_gets_twice_the_time_that_the_others_took() -> None:
    """On a busy machine all are late; at most a second. Whoever writes is suspected no more: its workers are waited for
    as anybody's."""
    for took_s, waited_s, forms in ((0.3, 0.29, False), (0.3, 0.31, True), (3600.0, 0.0, True)):
        scene = suspected(acknowledged("b", 2, 3))
        scene.decide(after_s=took_s)
        scene.show(*frees(3, "b")).decide()
        assert (scene.decide(after_s=waited_s).action is Action.FORM) == forms, (took_s, waited_s)
    scene = suspected(acknowledged("c", 3, 3))
    assert scene.said(after_s=1.0) == "waiting for c to be free"
    formed = scene.show(*frees(3, "c")).forms()
    assert (names(formed), formed.ghosts) == ("a b c", ())


def test_a_worker_that_stands_still_is_not_waited_for() -> None:
    """Its agent has said so. The next round names what was found, and the node may come back with the next report."""
    why = "worker 0 of node c hangs: its process is stopped"
    scene = trio(BROKEN, 3, reason=why, cause=Cause.WORKER_HUNG)
    formed = scene.show(*frees(3, "ab"), acknowledged("c", 3, 3, stuck=True)).forms()
    assert (names(formed), formed.reason, formed.cause) == ("a b", why, Cause.WORKER_HUNG)
    scene.adopt(formed).show(node("c", 3, mod=150, acknowledged=4, stuck=True)).decide()
    assert scene.decide(after_s=6.0).action is Action.WAIT  # nobody would come into the round that names it
    scene.show(node("c", 3, mod=200, acknowledged=4, reported=4)).decide()
    assert scene.said(after_s=6.0) == "drain to a b c: node c joins"


def test_a_newcomer_whose_planned_round_lost_all_others_gets_one_of_another_number() -> None:
    """It may have begun to form the planned round already, and would never enter another of the same number (found by
    the simulation: the only member's lease ended while a node joined)."""
    only, newcomer = node("a", 1), node("b", 2)
    planned = round_of(2, [only, newcomer])
    scene = Scene(me="b", limits=ALONE).show(only, newcomer)
    scene.adopt(round_of(1, [only], RoundState.DRAINING, next=planned)).lose("a").decide()
    assert scene.said(after_s=5.0) == "form 3: b"


# ---- only some sizes


def test_rounds_are_of_allowed_sizes() -> None:
    """Of three survivors two go on, the newest step with them. Two train, and a third changes nothing; with a fourth
    both are taken in at once. In the middle of a call none can be spared: as many as there are complete it, and then a
    planned change, which saves, brings an allowed number."""
    even = replace(IN_PLACE, sizes=(2, 4))
    for ahead, expected in (("a", "a b"), ("c", "a c")):
        scene = trio(BROKEN).show(*frees(1), *frees(1, ahead, step=8))
        scene.limits = even
        assert names(scene.forms()) == expected
    scene = trio(members="ab").show(node("x", 50))
    scene.limits = even
    assert scene.said(after_s=3600.0) == "all is well"
    assert scene.show(node("y", 51)).said(after_s=1.0) == "drain to a b x y: nodes x, y join"
    scene = trio(BROKEN).show(*frees(1, joinable=False))
    scene.limits = even
    assert scene.follow() == "form 2: a b c"
    assert scene.follow() == "drain: a round may have 2 nodes"
    assert scene.show(*frees(2, planned=True)).said() == "form 3: a b"


# ---- who is named


def nodes(**unreachable: tuple[str, ...]) -> list[NodeView]:
    """Nodes in rank order, with whom each could not reach."""
    return [node(name, rank + 1, unreachable=names) for rank, (name, names) in enumerate(unreachable.items())]


@pytest.mark.parametrize(
    ("tried", "stalled", "expected"),
    [
        (nodes(a=(), b=(), c=()), FAILED_ROUNDS, None),
        (nodes(a=("c",), b=("c",), c=("a", "b")), FAILED_ROUNDS, "c"),
        (nodes(a=("b", "c"), b=("a",), c=("a",)), FAILED_ROUNDS, "a"),
        (nodes(a=(), b=("c",), c=("b",)), FAILED_ROUNDS, "c"),  # of equals the last: who came first stays
        (nodes(a=("x",), b=("x",), c=()), FAILED_ROUNDS, None),  # x is not among them anyway
        (nodes(a=("a",), b=("c",), c=("b",)), FAILED_ROUNDS, "a"),  # who names itself knows better than the others
        (nodes(a=("a",), b=("b",), c=()), FAILED_ROUNDS, "b"),
        (nodes(a=("c",), b=("c",), c=()), FAILED_ROUNDS - 1, None),  # one side alone: the other may have been slow
        (nodes(a=("c",), b=(), c=("a",)), 0, "c"),  # both sides: a round with both would be formed in vain
        (nodes(a=("b", "c"), b=("a",), c=("a",)), 0, "a"),
        (nodes(a=("b", "c"), b=(), c=("a",)), 0, "c"),  # b was only slow
    ],
)
def test_the_node_that_most_others_cannot_reach_is_left_out(
    tried: list[NodeView], stalled: int, expected: str | None
) -> None:
    found = left_out(tried, stalled)
    assert (None if found is None else found.id) == expected


@pytest.mark.parametrize(
    ("tried", "others", "expected"),
    [
        ("10.0.0.3", {"b": "10.0.0.2", "c": "10.0.0.3"}, "c"),
        ("127.0.0.1", {"b": "10.0.0.2"}, "b"),
        ("", {"b": "10.0.0.2"}, None),
        ("127.0.0.1", {"b": "10.0.0.2", "c": "10.0.0.3"}, None),
        ("10.0.0.2", {"b": "10.0.0.2", "c": "10.0.0.2"}, None),
    ],
)
def test_who_was_not_reached_follows_from_the_address_that_was_tried(
    tried: str, others: dict[str, str], expected: str | None
) -> None:
    assert blamed(tried, {name: node(name, 1, address=address).record for name, address in others.items()}) == expected


def test_the_sentence_names_both_nodes_the_address_and_whose_it_is() -> None:
    assert cannot_reach("a", "b", "10.0.0.2", "10.0.0.2", "timed out") == (
        "node a cannot reach node b at 10.0.0.2, which b announces (timed out); to check, run 'elastic-trainer doctor"
        " --endpoint HOST:2379 --run-id check --peers 2' on both"
    )
    other = cannot_reach("a", "b", "10.0.0.2", "127.0.0.1", "refused")
    assert "at 127.0.0.1, which its worker published, while its agent announces 10.0.0.2 (refused)" in other


# ---- shard groups

PAIRS = replace(IN_PLACE, min_nodes=2, max_nodes=6, sizes=(2, 4, 6), shard_nodes=2)


def at(name: str, created: int, **record: Any) -> NodeView:
    """A ready node called after its slot: "a0" has slot 0."""
    return node(name, created, shard_slot=int(name[-1]), **record)


def training(*members: str, **more: Any) -> Scene:
    """A round of these."""
    nodes = [at(name, i + 1, acknowledged=1, reported=1) for i, name in enumerate(members)]
    return Scene(me=members[0], limits=PAIRS).show(*nodes).adopt(round_of(1, nodes, **more))


def over(*members: str, lost: str = "", **more: Any) -> Scene:
    """It is over, and the members but for ``lost`` are free."""
    scene = training(*members, state=BROKEN)
    for name in lost.split():
        scene.lose(name)
    left = [
        free(name, i + 1, 1, shard_slot=int(name[-1]), **more) for i, name in enumerate(members) if name in scene.nodes
    ]
    scene.me = left[0].id
    return scene.show(*left)


def departing(name: str, created: int) -> NodeView:
    return at(name, created, acknowledged=1, reported=1, state=NodeState.DRAINING)


def moved(scene: Scene) -> tuple[str, int] | None:
    """The spare that should begin anew, and where."""
    found = move(scene.view())
    return (found[0].id, found[1]) if found is not None else None


def test_a_node_that_dies_makes_the_other_of_its_group_a_spare() -> None:
    """The other group goes on; the spare takes part in no round until its group has the missing slot. Survivors of two
    broken groups are one whole group at once, behind the groups that nobody has left."""
    scene = over("a0", "a1", "b0", "b1", lost="a1")
    assert scene.follow() == "form 2: b0 b1"
    assert scene.said(after_s=3600.0) == "all is well"
    assert names(made(scene.show(at("x1", 50)).decide(after_s=6.0), Action.DRAIN).next) == "b0 b1 a0 x1"
    assert over("a0", "a1", "b0", "b1", "c0", "c1", lost="a1 b0").said() == "form 2: c0 c1 a0 b1"


def test_too_few_for_a_group_wait_for_the_slot_that_is_missing() -> None:
    """Two survivors of one slot make no group, and what is missing is said; a newcomer makes one at once."""
    scene = over("a0", "a1", "b0", "b1", lost="a1 b1")
    assert scene.said() == "0 of at least 2 nodes are ready in whole groups of 2"
    assert scene.show(at("x1", 50)).said() == "form 2: a0 x1"


def test_a_node_that_leaves_takes_its_group_along_unless_a_spare_has_its_slot() -> None:
    """By a planned change: the others switch at one step, and nothing is saved or stopped. If it is the only group its
    shards are saved, though a spare has the slot: the spare has not got them."""
    for spare, expected in (("x0", "b0 b1"), ("x1", "b0 b1 a0 x1")):
        scene = training("a0", "a1", "b0", "b1").show(at(spare, 50), departing("a1", 2))
        assert names(made(scene.decide(), Action.DRAIN).next) == expected
    assert made(training("a0", "a1").show(departing("a1", 2)).decide(), Action.DRAIN).next is None
    scene = training("a0", "a1").show(at("b1", 50), departing("a1", 2))
    assert made(scene.decide(), Action.DRAIN).next is None
    scene.follow()
    assert scene.show(free("a0", 1, 1, shard_slot=0)).lose("a1").said() == "form 2: a0 b1"


def test_of_two_groups_the_one_with_the_newest_step_goes_on() -> None:
    scene = over("a0", "a1", "b0", "b1").show(free("b1", 4, 1, step=8, shard_slot=1))
    scene.limits = replace(PAIRS, max_nodes=2, sizes=(2,))
    assert scene.said() == "form 2: b0 b1"


def test_survivors_in_a_call_take_no_newcomer_into_their_groups() -> None:
    """A spare of theirs waits; without any whole group all do, and then one begins anew."""
    scene = over("a0", "a1", "b0", "b1", lost="a1", joinable=False).show(at("x1", 50))
    assert scene.said() == "form 2: b0 b1"
    scene = over("a0", "a1", lost="a1", joinable=False).show(at("x1", 50))
    assert scene.said().startswith("the survivors form no whole group")
    assert moved(scene) == ("a0", 0)


def test_a_first_round_gathers_whole_groups() -> None:
    scene = Scene(me="a0", limits=PAIRS)
    scene.show(*(at(name, i + 1) for i, name in enumerate(("a0", "b0", "c0", "d0", "a1", "b1"))))
    assert scene.said(after_s=1.0) == "last call for more nodes"
    assert scene.said(after_s=3.0) == "form 1: a0 a1 b0 b1"


def test_nodes_that_begin_together_come_to_different_slots() -> None:
    """All see nobody and take the first slot; then each gives way to those that are more senior."""
    nodes = {f"n{i}": node(f"n{i}", i + 1, shard_slot=0, state=NodeState.WARMING) for i in range(6)}
    for _ in range(3):
        for name, each in nodes.items():
            record = each.record.model_copy(update={"shard_slot": slot_of(nodes.values(), name, 3)})
            nodes[name] = replace(each, record=record)
    assert [each.record.shard_slot for each in nodes.values()] == [0, 1, 2, 0, 1, 2]


def test_a_node_whose_workers_died_takes_the_slot_that_is_missing() -> None:
    """Though it is older than a spare. So does a new node, also that of one whose lease stands though it is dead: who
    formed the round has found it so."""
    warming = at("a1", 2, state=NodeState.WARMING)
    assert slot_of([at("a0", 1), warming, at("b0", 3), at("b1", 4)], "a1", 2) == 1
    assert slot_of([at("b0", 3), at("b1", 4), at("c1", 5)], "x", 2) == 0
    scene = training("a0", "a1", ghosts=(at("b1", 3).ghost,)).show(at("b1", 3), at("c0", 4))
    assert slot_of(scene.nodes.values(), "x", 2) == 0
    assert slot_of(scene.view().living, "x", 2) == 1


def test_a_spare_without_state_takes_the_missing_slot_first() -> None:
    """Then one with the oldest state, but nobody while groups are whole as they are, and nobody who trains."""
    assert moved(training("a0", "a1").show(at("b0", 3, identity=held(7)), at("c0", 4), at("d0", 5))) == ("d0", 1)
    assert moved(training("a0", "a1").show(at("b0", 3, identity=held(9)), at("c0", 4, identity=held(7)))) == ("c0", 1)
    assert moved(training("a0", "a1").show(at("b0", 3))) is moved(training("a0", "a1", "b0", "b1")) is None


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=12), st.data())
def test_all_that_can_be_are_in_whole_groups(size: int, slots: list[int], data: st.DataObject) -> None:
    """As many groups as the rarest slot allows, each with every slot once in order; groups that are whole stay."""
    limits = replace(PAIRS, min_nodes=size, max_nodes=12 * size, sizes=(), shard_nodes=size)
    nodes = [node(f"n{i}", i + 1, shard_slot=slot % size) for i, slot in enumerate(slots)]
    scene = Scene(me="n0", limits=limits).show(*nodes)
    before = in_groups(scene.view(), nodes) if size > 1 else nodes
    gone = data.draw(st.sets(st.sampled_from([each.id for each in before]))) if before else set()
    scene.adopt(round_of(1, before, BROKEN))
    ready = [
        free(each.id, each.create_revision, 1, shard_slot=each.record.shard_slot)
        for each in nodes
        if each.id not in gone
    ]
    scene.nodes = {each.id: each for each in ready}
    found = in_groups(scene.view(), scene.view().candidates)
    supply = Counter(each.record.shard_slot for each in ready)
    assert len(found) == size * min(supply[slot] for slot in range(size))
    if size > 1:
        assert [each.record.shard_slot for each in found] == [i % size for i in range(len(found))]
        was = [[each.id for each in before[i : i + size]] for i in range(0, len(before), size)]
        now = [[each.id for each in found[i : i + size]] for i in range(0, len(found), size)]
        whole = [group for group in was if not gone.intersection(group)]
        assert now[: len(whole)] == whole
