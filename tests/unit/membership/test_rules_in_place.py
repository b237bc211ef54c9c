"""The membership rules of in-place recovery, clause by clause; nodes that cannot reach each other; shard groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.membership.cluster_view import NodeView, in_groups, living, move, place_of
from elastic_trainer.membership.documents import Identity, NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.rules import (
    FAILED_ROUNDS,
    UNFORMED_ROUNDS,
    Action,
    Decision,
    blamed,
    broken,
    cannot_reach,
    left_out,
)
from elastic_trainer.model import Cause, RecoveryMode
from tests.unit.membership.scenes import LIMITS, Scene, node, round_of

IN_PLACE = replace(
    LIMITS, recovery=RecoveryMode.IN_PLACE, regroup_grace_s=0.5, report_floor_s=10.0, failure_limit=3, stalled_rounds=4
)


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
    return node(name, created, mod=100 + created, **(values | {"cause": "its worker 0 was lost"} | record))


def trio(state: RoundState = RoundState.ACTIVE, number: int = 1, **more: Any) -> Scene:
    """Round ``number`` of a, b and c."""
    nodes = [node(name, i + 1, acknowledged=number, reported=number) for i, name in enumerate("abc")]
    return Scene(limits=IN_PLACE).show(*nodes).adopt(round_of(number, nodes, state, **more))


def names(document: RoundDocument | None) -> list[str]:
    assert document is not None
    return [member.node for member in document.members]


def made(decision: Decision, action: Action) -> RoundDocument:
    """The document of a decision that must be ``action``."""
    assert decision.action is action, decision
    assert decision.round is not None
    return decision.round


# ---- planned changes


def drained(scene: Scene | None = None) -> Scene:
    """A newcomer x is being taken in."""
    scene = (scene or trio()).show(node("x", 50))
    scene.decide()
    return scene.adopt(made(scene.decide(after_s=6.0), Action.DRAIN))


def test_a_planned_change_carries_the_complete_next_round() -> None:
    """So the workers can switch without etcd: number, ranks, store and nonce are known before."""
    scene = drained()
    assert scene.round is not None
    following = scene.round.next
    assert scene.round.number == 1
    assert following is not None
    assert (following.number, following.nonce, following.state) == (2, "fresh", RoundState.ACTIVE)
    assert [(member.node, member.first_rank) for member in following.members] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("x", 3),
    ]
    assert following.store == "127.0.0.1:1001"


def test_the_switch_is_complete_when_all_that_stay_have_reported() -> None:
    """Newcomers need not report: they are free anyway. The round then formed is the very one that was announced."""
    scene = drained()
    scene.show(*(free(name, i + 1, 1, planned=True) for i, name in enumerate("ab")))
    waiting = scene.decide(after_s=3600.0)
    assert waiting.action is Action.WAIT
    assert waiting.reason == "waiting for c to reach the agreed step"
    scene.show(free("c", 3, 1, planned=True))
    formed = made(scene.decide(), Action.FORM)
    assert scene.round is not None
    assert formed == scene.round.next


def test_who_dies_while_a_planned_change_is_under_way_is_not_waited_for() -> None:
    """A newcomer whose agent's port refuses connections, and a member too: the round with it would stand still until
    its lease ends."""
    for dead in ("x", "c"):
        scene = drained()
        scene.suspects = frozenset({dead})
        ended = made(scene.decide(), Action.BREAK)
        assert ended.reason == f"node {dead} is gone"


def test_a_dead_newcomer_is_not_taken_in() -> None:
    """It died before the change was decided: there is none."""
    scene = trio().show(node("x", 50))
    scene.decide()
    scene.suspects = frozenset({"x"})
    assert scene.decide(after_s=6.0).reason == "all is well"


def test_a_leaving_node_is_not_in_the_next_round_and_not_waited_for() -> None:
    """Ranks close up behind it; the others switch without asking it."""
    scene = trio().show(node("a", 1, mod=9, acknowledged=1, reported=1, state=NodeState.DRAINING))
    draining = made(scene.decide(), Action.DRAIN)
    assert draining.reason == "node a leaves"
    assert draining.next is not None
    assert [(member.node, member.first_rank) for member in draining.next.members] == [("b", 0), ("c", 1)]
    scene.adopt(draining).show(free("b", 2, 1, planned=True), free("c", 3, 1, planned=True))
    assert made(scene.decide(after_s=1.0), Action.FORM) == draining.next


def test_a_newcomer_takes_the_place_of_a_leaver_at_once() -> None:
    """One planned change does both, without waiting for the batch time."""
    scene = trio().show(node("x", 50), node("b", 2, mod=9, acknowledged=1, reported=1, state=NodeState.DRAINING))
    draining = made(scene.decide(), Action.DRAIN)
    assert names(draining.next) == ["a", "c", "x"]
    assert draining.reason == "node b leaves; node x joins"


def test_below_min_a_planned_change_has_no_next_round_and_waits_for_everybody() -> None:
    """The agreed step and the checkpoint may take long; no grace cuts them short. Then too few are left."""
    pair = [node("a", 1), node("b", 2)]
    leaver = node("b", 2, mod=9, state=NodeState.DRAINING)
    scene = Scene(limits=IN_PLACE).show(*pair).adopt(round_of(1, pair)).show(leaver)
    draining = made(scene.decide(), Action.DRAIN)
    assert draining.next is None
    scene.adopt(draining).show(node("x", 50))
    assert scene.decide(after_s=3600.0).reason == "waiting for a, b to be free"
    scene.show(free("a", 1, 1, planned=True))
    assert scene.decide(after_s=3600.0).reason == "waiting for b to be free"
    scene.lose("b")
    assert names(made(scene.decide(), Action.FORM)) == ["a", "x"]


def test_a_change_that_nobody_stays_for_goes_through_storage() -> None:
    """All members leave while others stand ready: without a next round they save a checkpoint before they go."""
    limits = replace(IN_PLACE, min_nodes=1, max_nodes=1)
    only = node("a", 1, mod=9, state=NodeState.DRAINING)
    scene = Scene(limits=limits).show(only, node("x", 50)).adopt(round_of(1, [node("a", 1)]))
    draining = made(scene.decide(), Action.DRAIN)
    assert draining.next is None
    scene.adopt(draining)
    assert scene.decide(after_s=60.0).action is Action.WAIT
    scene.show(free("a", 1, 1, state=NodeState.DRAINING, planned=True))
    assert names(made(scene.decide(), Action.FORM)) == ["x"]


def test_a_failure_overrides_a_planned_change() -> None:
    """Some ranks may have switched: the round that is broken is the next one, with its members."""
    scene = drained().show(ended("b", 2, 1))
    broken = made(scene.decide(), Action.BREAK)
    assert (broken.number, broken.state, broken.next) == (2, RoundState.BROKEN, None)
    assert names(broken) == list("abcx")
    assert broken.reason == "node b left the round: its worker 0 was lost"


def test_the_loss_of_a_newcomer_overrides_its_planned_change() -> None:
    """It is needed by the next round although it is not a member of the present one."""
    scene = drained().lose("x")
    assert made(scene.decide(), Action.BREAK).reason == "node x is gone"


def test_the_loss_of_a_leaver_changes_nothing() -> None:
    """It was to go anyway."""
    scene = trio().show(node("a", 1, mod=9, acknowledged=1, reported=1, state=NodeState.DRAINING))
    scene.me = "b"
    scene.decide()
    scene.adopt(made(scene.decide(after_s=1.0), Action.DRAIN)).lose("a")
    assert scene.decide(after_s=1.0).action is Action.WAIT


def test_after_a_failure_in_a_change_all_must_leave_the_next_round_too() -> None:
    """Who has switched already has reported the next number, which is the broken one: it is not free yet."""
    scene = drained().show(ended("b", 2, 1))
    scene.adopt(made(scene.decide(), Action.BREAK))
    scene.show(*(free(name, i, 1, planned=True) for name, i in (("a", 1), ("c", 3))))
    assert scene.decide(after_s=0.4).action is Action.WAIT
    scene.show(*(free(name, i, 2) for name, i in (("a", 1), ("c", 3), ("x", 50))))
    formed = made(scene.decide(), Action.FORM)
    assert formed.number == 3
    assert names(formed) == ["a", "c", "x"]


# ---- failures


def test_survivors_go_on_as_soon_as_all_are_free() -> None:
    """Nothing is waited for: the lost node's workers come back later, by a planned change."""
    scene = trio(RoundState.BROKEN, worker_failed=True).show(free("a", 1, 1), free("c", 3, 1), ended("b", 2, 1))
    formed = made(scene.decide(), Action.FORM)
    assert [(member.node, member.first_rank) for member in formed.members] == [("a", 0), ("c", 1)]
    assert formed.number == 2
    assert formed.ghosts == ()


def test_a_node_that_does_not_acknowledge_is_left_out_after_the_grace() -> None:
    """It may be dead or cut off; its key counts for nothing until it changes."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1))
    waiting = scene.decide(after_s=0.4)
    assert waiting.reason == "waiting for b to be free"
    assert waiting.again_in_s is not None
    assert round(waiting.again_in_s, 3) == 0.1
    formed = made(scene.decide(after_s=0.2), Action.FORM)
    assert names(formed) == ["a", "c"]
    assert formed.ghosts == (node("b", 2).ghost,)
    assert formed.reason == "node b was lost"


def test_what_a_restored_backup_says_of_a_node_is_not_believed() -> None:
    """The round means its third life, its key shows the first: it is waited for until it has said what it is now, and
    neither taken in as it was then nor reported as one that has left."""
    members = [node("a", 1), node("b", 2, life=3)]
    standing = round_of(5, members)
    scene = Scene(limits=IN_PLACE).show(node("a", 1, acknowledged=5, reported=5), node("b", 2, mod=3)).adopt(standing)
    assert scene.decide().action is Action.WAIT
    scene.adopt(standing.model_copy(update={"state": RoundState.BROKEN})).show(free("a", 1, 5))
    assert scene.decide().reason == "waiting for b to be free"
    scene.show(free("b", 2, 5, life=3))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "b"]


def test_a_dead_agent_is_not_waited_for_at_all() -> None:
    """Its port refuses connections."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1))
    scene.suspects = frozenset({"b"})
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c"]


def test_a_node_that_has_acknowledged_gets_time_for_its_step() -> None:
    """Twice its step time, at least the floor: the agent lives, its workers are in the middle of something."""
    for step_time_s, bound_s in ((0.1, 10.0), (20.0, 40.0)):
        scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1))
        scene.show(acknowledged("b", 2, 1, step_time_s=step_time_s))
        assert scene.decide(after_s=bound_s - 0.1).reason == "waiting for b to be free"
        assert names(made(scene.decide(after_s=0.2), Action.FORM)) == ["a", "c"]


def test_a_node_whose_workers_are_busy_is_waited_for_and_named_with_the_reason() -> None:
    """They save, say: that is no reason to go on without them, and their own agent sees that it does not last."""
    scene = trio(RoundState.BROKEN).show(
        free("a", 1, 1), free("c", 3, 1), acknowledged("b", 2, 1, busy="in checkpoint")
    )
    waiting = scene.decide(after_s=3600.0)
    assert waiting.action is Action.WAIT
    assert waiting.reason == "waiting for b (in checkpoint) to be free"
    scene.show(free("b", 2, 1))
    assert names(made(scene.decide(), Action.FORM)) == list("abc")


def test_nobody_goes_on_without_the_only_ones_that_hold_the_state() -> None:
    """A worker that was started again is ready before any survivor is: it would begin at the last checkpoint. Nor
    without the one that has committed a step more than those that are free."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1, life=2, identity=None), acknowledged("b", 2, 1))
    scene.show(free("c", 3, 1, life=2, identity=None))
    assert scene.decide(after_s=60.0).reason == "waiting for b to be free"
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1), acknowledged("b", 2, 1, committed=8))
    assert scene.decide(after_s=60.0).reason == "waiting for b to be free"
    scene.show(acknowledged("b", 2, 1, committed=7))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c"]


def test_a_silent_node_that_alone_holds_the_state_is_waited_for_while_its_key_stands() -> None:
    """Its agent may be slow to hear of the end; if it is dead its port or its lease shows it."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1, life=2, identity=None), free("c", 3, 1, life=2, identity=None))
    assert scene.decide(after_s=60.0).reason == "waiting for b to be free"
    scene.lose("b")
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c"]


def test_a_ghost_counts_again_when_its_key_changes() -> None:
    """It was alive after all: a newcomer like any other, with its state."""
    pair = [node("a", 1, acknowledged=2, reported=2), node("c", 3, acknowledged=2, reported=2)]
    ghost = node("b", 2)
    scene = Scene(limits=IN_PLACE).show(*pair, ghost)
    scene.adopt(round_of(2, pair, ghosts=(node("b", 2).ghost,)))
    assert scene.decide(after_s=60.0).action is Action.WAIT
    scene.show(free("b", 2, 1, planned=True))
    scene.decide()
    assert names(made(scene.decide(after_s=6.0), Action.DRAIN).next) == ["a", "c", "b"]


def test_newcomers_are_not_taken_in_by_a_failure_that_leaves_enough() -> None:
    """All members come back, with one newcomer: it waits for the next planned change, for it would cost all a delay."""
    scene = trio(RoundState.BROKEN).show(*(free(name, i + 1, 1) for i, name in enumerate("abc")), node("x", 50))
    assert names(made(scene.decide(), Action.FORM)) == list("abc")


def test_a_warm_spare_replaces_a_lost_node_at_once() -> None:
    """As many as were lost, no more."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1), node("x", 50), node("y", 51)).lose("b")
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c", "x"]


def test_newcomers_complete_survivors_who_are_too_few() -> None:
    """The round comes when all together are enough."""
    scene = bereft(joinable=True)
    assert scene.decide(after_s=3600.0).reason == "1 of at least 3 nodes are ready"
    scene.show(node("x", 50), node("y", 51))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "x", "y"]


def bereft(*, joinable: bool) -> Scene:
    """a is left of a round of three, which is the least there may be."""
    scene = Scene(limits=replace(IN_PLACE, min_nodes=3)).show(free("a", 1, 1, joinable=joinable))
    return scene.adopt(round_of(1, [node("a", 1), node("b", 2), node("c", 3)], RoundState.BROKEN))


def test_survivors_who_are_too_few_complete_an_evaluation_before_newcomers_join_them() -> None:
    """Once enough are there, those who are in it go on by themselves, and the others come by a planned change at once:
    in the evaluation all would wait for each other."""
    scene = bereft(joinable=False)
    assert scene.decide(after_s=3600.0).reason == "1 of at least 3 nodes are ready"
    scene.show(node("x", 50), node("y", 51))
    alone = made(scene.decide(), Action.FORM)
    assert names(alone) == ["a"]
    scene.show(free("a", 1, 1, joinable=False)).adopt(alone)
    scene.decide()
    assert names(made(scene.decide(), Action.DRAIN).next) == ["a", "x", "y"]


def test_a_newcomer_of_a_change_that_failed_is_no_survivor() -> None:
    """A planned change named x, and b died amid an evaluation before anybody had made it: x cannot follow a and c
    there, and is not lost either."""
    scene = drained()
    scene.show(ended("b", 2, 1), free("a", 1, 2, joinable=False), free("c", 3, 2, joinable=False))
    scene.adopt(made(scene.decide(), Action.BREAK))
    scene.show(node("x", 50, acknowledged=3, reported=3, newcomer=True))
    following = made(scene.decide(), Action.FORM)
    assert names(following) == ["a", "c"]
    assert "x" not in following.reason


def test_survivors_in_the_middle_of_an_evaluation_go_on_alone() -> None:
    """A spare could not follow them there; it comes by the next planned change."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1, joinable=False), free("c", 3, 1), node("x", 50)).lose("b")
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c"]


def test_those_behind_a_step_are_not_waited_for_where_all_are_needed() -> None:
    """All others have met in a later round and are in no call: who is still behind its step is needed all the same."""
    scene = bereft(joinable=False).show(free("a", 1, 1, joinable=False, met=("one",)))
    scene.show(free("b", 2, 1, met=("two",)), free("c", 3, 1, met=("two",)))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "b", "c"]


def test_members_of_which_some_have_met_in_the_round_before_complete_their_call_together() -> None:
    """The round ended while its ranks came to one state: a and b have met in it, c has not."""
    scene = trio(RoundState.BROKEN).show(node("x", 50))
    both, before = ("two", "one"), ("one", "none")
    scene.show(*(free(name, i, 1, joinable=False, met=both) for name, i in (("a", 1), ("b", 2))))
    scene.show(free("c", 3, 1, joinable=False, met=before))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "b", "c"]


def test_finishing_members_are_no_candidates_and_end_the_run() -> None:
    """The training is over for them: no round is formed of them, whatever becomes of the others."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1, state=NodeState.FINISHING))
    scene.show(*(free(name, i, 1, state=NodeState.FINISHING) for name, i in (("b", 2), ("c", 3))))
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    scene.show(*(free(name, i, 1, state=NodeState.DONE) for name, i in (("a", 1), ("b", 2), ("c", 3))))
    assert made(scene.decide(), Action.CLOSE).result is RunResult.SUCCEEDED


# ---- giving up


def fail(scene: Scene, number: int, step: int, victim: str = "b", *, worker: bool = True, **state: Any) -> Decision:
    """Round ``number`` breaks at ``step`` because of ``victim``; what the survivors decide."""
    assert scene.round is not None
    broken = scene.round.model_copy(update={"state": RoundState.BROKEN, "worker_failed": worker, "reason": "broken"})
    scene.adopt(broken)
    for i, name in enumerate("abc"):
        life = 1 if scene.round.member(name) is None else next(m.life for m in broken.members if m.node == name)
        if name == victim and worker:
            scene.show(ended(name, i + 1, number, life=life + 1))
        else:
            scene.show(free(name, i + 1, number, life=life, identity=held(step, number, **state)))
    decision = scene.decide()
    if decision.action is Action.FORM:
        scene.adopt(decision.round)
    return decision


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
    """A poison batch kills one node after another: the third failure closes, naming the step and the samples."""
    scene = trio()
    place: dict[str, Any] = {"epoch": 2, "samples": 96, "batch": 32}
    for number, victim in ((1, "b"), (3, "c")):
        made(fail(scene, number, 40, victim, **place), Action.FORM)
        rejoin(scene, number + 2)
    closed = made(fail(scene, 5, 40, "a", **place), Action.CLOSE)
    assert closed.result is RunResult.FAILED
    expected = "3 worker failures after step 40, without a step committed since (epoch 2, samples 96 to 127 of its"
    assert closed.reason.startswith(expected)
    scene.adopt(closed)
    assert scene.decide(after_s=3600.0).action is Action.WAIT


def test_a_step_committed_in_between_starts_the_count_anew() -> None:
    """Faults that let the job come on never end it."""
    scene = trio()
    for turn in range(6):
        made(fail(scene, 1 + 2 * turn, 40 + turn, "abc"[turn % 3]), Action.FORM)
        rejoin(scene, 3 + 2 * turn)
    assert scene.round is not None
    assert scene.round.failures == 1


def test_a_planned_change_does_not_start_the_count_anew() -> None:
    """Neither does it count itself."""
    scene = trio(last_step=40, failures=2, stalled=3).show(node("x", 50))
    scene.decide()
    following = made(scene.decide(after_s=6.0), Action.DRAIN).next
    assert following is not None
    assert (following.last_step, following.failures, following.stalled) == (40, 2, 3)


def test_a_worker_that_died_counts_also_if_another_reported_first() -> None:
    """A peer's failed collective may win the race for the round document: the lost life shows who failed."""
    scene = trio(RoundState.BROKEN, worker_failed=False).show(free("a", 1, 1), free("c", 3, 1), ended("b", 2, 1))
    assert made(scene.decide(), Action.FORM).failures == 1


def test_lost_nodes_are_no_failures_of_workers() -> None:
    """Machines that go away at one step say nothing about that step."""
    scene = trio(RoundState.BROKEN).show(free("a", 1, 1), free("c", 3, 1)).lose("b")
    assert made(scene.decide(), Action.FORM).failures == 0


def test_rounds_without_a_committed_step_end_the_run() -> None:
    """Nobody dies and yet nothing moves: collectives that never work, say."""
    scene = trio()
    for number in range(1, 5):
        made(fail(scene, number, 0, "", worker=False), Action.FORM)
    closed = made(fail(scene, 5, 0, "", worker=False), Action.CLOSE)
    assert closed.reason.startswith("4 consecutive rounds ended after step 0, without a step committed since")


def test_rounds_that_never_get_to_a_state_end_the_run_too() -> None:
    """Nodes that cannot reach each other's stores never hold a state; they must not try for ever."""
    scene = trio()
    for number in range(1, 4):
        nodes = [free(name, i + 1, number, identity=None) for i, name in enumerate("abc")]
        assert scene.round is not None
        scene.adopt(scene.round.model_copy(update={"state": RoundState.BROKEN})).show(*nodes)
        scene.adopt(made(scene.decide(), Action.FORM))
    nodes = [free(name, i + 1, 4, identity=None) for i, name in enumerate("abc")]
    assert scene.round is not None
    scene.adopt(scene.round.model_copy(update={"state": RoundState.BROKEN})).show(*nodes)
    assert made(scene.decide(), Action.CLOSE).reason.startswith("4 consecutive rounds ended before the first step")


def alone(number: int, life: int, last_step: int | None, failures: int, reached: int) -> Scene:
    """The only node of a job has lost its workers, again; they had come to step ``reached``."""
    before = node("a", 1, life=life)
    again = free("a", 1, number, life=life + 1, identity=None, reached=held(reached))
    broken = round_of(number, [before], RoundState.BROKEN, last_step=last_step, failures=failures, worker_failed=True)
    return Scene(limits=replace(IN_PLACE, min_nodes=1)).show(again).adopt(broken)


def test_failures_are_counted_where_nobody_survives_as_well() -> None:
    """A single node that dies at one place, restored from one checkpoint each time: its agent knows how far it came."""
    first = made(alone(1, 1, None, 0, 5).decide(), Action.FORM)
    assert (first.last_step, first.failures) == (5, 1)
    second = made(alone(2, 2, 5, 1, 4).decide(), Action.FORM)
    assert (second.last_step, second.failures) == (5, 2)
    assert made(alone(3, 3, 5, 2, 5).decide(), Action.CLOSE).reason.startswith("3 worker failures after step 5")


def test_a_single_node_that_comes_on_between_its_failures_is_not_given_up() -> None:
    """One crash a day is not a poison batch."""
    document = made(alone(3, 3, 1000, 2, 9000).decide(), Action.FORM)
    assert (document.last_step, document.failures) == (9000, 1)


def test_scripts_of_restart_mode_are_not_given_up() -> None:
    """How far they have come is not known, so no number of restarts proves anything."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*(free(n.id, n.create_revision, 1, life=2, identity=None, planned=True) for n in nodes))
    scene.adopt(round_of(1, nodes, RoundState.BROKEN, failures=99, stalled=99))
    assert scene.decide().action is Action.FORM


# ---- members that do not reach each other


def test_after_two_rounds_in_vain_the_unreachable_node_is_left_out_and_named() -> None:
    """The round without it says so; while only one round has failed all are in the next."""
    scene = trio(RoundState.BROKEN, 3, last_step=7, stalled=0)
    scene.show(free("a", 1, 3, unreachable=("c",)), free("b", 2, 3), free("c", 3, 3))
    again = made(scene.decide(), Action.FORM)
    assert (names(again), again.left_out, again.stalled) == (["a", "b", "c"], None, 1)
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=1)
    scene.show(free("a", 1, 4, unreachable=("c",)), free("b", 2, 4), free("c", 3, 4, unreachable=("a",)))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.left_out, without.stalled) == (["a", "b"], "c", 2)
    assert without.reason.startswith("node c is excluded, which others cannot reach")
    assert without.ghosts == ()  # it may come back


def test_a_run_is_not_closed_while_fewer_nodes_can_train() -> None:
    """The limit of rounds in vain is reached, and a node is named: the others go on, and their count begins anew."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=3)
    scene.show(free("a", 1, 4, unreachable=("c",)), free("b", 2, 4), free("c", 3, 4))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.left_out, without.stalled) == (["a", "b"], "c", 0)


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("away", [0, 1, 7, None])
def test_a_run_ends_where_no_worker_reaches_another(count: int, named: bool, away: int | None) -> None:
    """Whether nodes name each other or nobody, and whenever those left out come back: after ``away`` rounds or never.
    Each count that begins anew does so with fewer nodes than any round before, so there are not many."""
    limits = replace(IN_PLACE, min_nodes=1, max_nodes=count)
    everybody = [f"n{each:02}" for each in range(count)]
    scene = Scene(me="n00", limits=limits).adopt(round_of(1, [node(each, i + 1) for i, each in enumerate(everybody)]))
    back = dict.fromkeys(everybody, 0)
    for number in range(1, count * limits.stalled_rounds + 1):
        assert scene.round is not None
        inside = names(scene.round)
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


def test_a_step_committed_since_allows_smaller_rounds_again() -> None:
    """The first one trains alone whenever the other comes and goes."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=3, fewest=2)
    scene.limits = replace(IN_PLACE, min_nodes=1)
    scene.show(free("a", 1, 4, unreachable=("c",)), free("b", 2, 4), free("c", 3, 4))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.stalled, without.fewest) == (["a"], 0, 1)
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=3, fewest=1)
    scene.show(*(free(name, i + 1, 4, step=8) for i, name in enumerate("abc")))
    again = made(scene.decide(), Action.FORM)
    assert (names(again), again.stalled, again.fewest) == (["a", "b", "c"], 0, 3)


def test_a_run_with_all_nodes_needed_is_closed_when_none_of_its_rounds_forms() -> None:
    """There is no smaller round."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=3, unformed=9)
    scene.limits = replace(IN_PLACE, min_nodes=3)
    scene.show(free("a", 1, 4, unreachable=("c",)), free("b", 2, 4), free("c", 3, 4))
    assert made(scene.decide(), Action.CLOSE).reason.startswith("4 consecutive rounds ended after step 7")


def test_worker_failures_end_the_run_though_a_node_is_named() -> None:
    """A poison batch is not excused by a bad network."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=1, failures=2, worker_failed=True)
    scene.show(free("a", 1, 4, unreachable=("c",)), free("b", 2, 4), free("c", 3, 4))
    assert made(scene.decide(), Action.CLOSE).reason.startswith("3 worker failures after step 7")


def test_the_last_to_come_is_left_out_when_rounds_do_not_form_and_nobody_is_named() -> None:
    """The reason says that it is a trial."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=2, unformed=UNFORMED_ROUNDS)
    scene.show(*(free(name, i + 1, 4) for i, name in enumerate("abc")))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.left_out, without.unformed) == (["a", "b"], "c", UNFORMED_ROUNDS)
    said = "node c, which joined last, is left out on trial: 4 rounds in a row did not form and no node is named: "
    assert without.reason.startswith(said)


def test_a_node_that_names_itself_is_left_out_though_it_came_first() -> None:
    """Its record says why, and so does the round."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=1)
    why = "workers of node a publish 127.0.0.1"
    scene.show(free("a", 1, 4, unreachable=("a",), cause=why), free("b", 2, 4), free("c", 3, 4, unreachable=("b",)))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.left_out) == (["b", "c"], "a")
    assert without.reason.startswith(f"node a is excluded, as {why}: ")


def test_the_only_node_with_the_training_state_is_not_left_out() -> None:
    """The others would begin again at the newest checkpoint, or at step 0. It trains on without them."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=1)
    scene.limits = replace(IN_PLACE, min_nodes=1)
    why = "workers of node a publish 127.0.0.1"
    scene.show(free("a", 1, 4, unreachable=("a",), cause=why))
    scene.show(*(free(name, i + 2, 4, identity=None, newcomer=True) for i, name in enumerate("bc")))
    without = made(scene.decide(), Action.FORM)
    assert (names(without), without.left_out) == (["a", "b"], "c")
    said = f"node c is excluded, instead of node a, which alone holds the training state, as {why}: "
    assert without.reason.startswith(said)


def test_only_who_was_in_the_rounds_that_failed_is_left_out() -> None:
    """Neither a newcomer that waits nor one that replaces a lost node: they were not tried. They take its place."""
    for lost in ("", "b"):
        scene = trio(RoundState.BROKEN, 5, last_step=7, stalled=2, unformed=5)
        scene.show(*(free(name, i + 1, 5) for i, name in enumerate("abc") if name != lost), node("x", 50))
        if lost:
            scene.lose(lost)
        formed = made(scene.decide(), Action.FORM)
        assert (names(formed), formed.left_out) == (["a", "b", "x"] if not lost else ["a", "x"], "c")


def test_a_spare_replaces_a_member_that_may_be_the_cause() -> None:
    """Though no fewer nodes may train."""
    pair = [node(name, i + 1, acknowledged=5, reported=5) for i, name in enumerate("ab")]
    standing = round_of(5, pair, RoundState.BROKEN, last_step=7, stalled=2, unformed=5)
    scene = Scene(limits=replace(IN_PLACE, min_nodes=2, max_nodes=2)).show(*pair).adopt(standing)
    scene.show(free("a", 1, 5), free("b", 2, 5), node("c", 50))
    formed = made(scene.decide(), Action.FORM)
    assert (names(formed), formed.left_out) == (["a", "c"], "b")


def test_nobody_is_left_out_in_a_call_that_too_few_could_complete() -> None:
    """No newcomer could take its place there."""
    pair = [node(name, i + 1, acknowledged=5, reported=5) for i, name in enumerate("ab")]
    scene = Scene(limits=IN_PLACE).show(*pair).adopt(round_of(5, pair, RoundState.BROKEN, stalled=2, unformed=5))
    scene.show(*(free(name, i + 1, 5, joinable=False, unreachable=("b",)) for i, name in enumerate("ab")))
    scene.show(node("c", 50))
    formed = made(scene.decide(), Action.FORM)
    assert (names(formed), formed.left_out) == (["a", "b"], None)


def test_only_rounds_in_a_row_that_did_not_form_count() -> None:
    """One that trained, or ended for another reason, begins the count anew."""
    nodes = [node(name, i + 1) for i, name in enumerate("ab")]
    first = broken(round_of(1, nodes), "no contact", cause=Cause.CONTACT_LOST, unformed=True)
    second = broken(round_of(2, nodes, unformed=first.unformed), "no contact", unformed=True)
    assert (first.unformed, second.unformed) == (1, 2)
    assert broken(round_of(3, nodes, unformed=2), "a node was lost").unformed == 0


def test_a_step_committed_since_makes_old_complaints_void() -> None:
    """Who was unreachable before may be reachable now."""
    scene = trio(RoundState.BROKEN, 4, last_step=7, stalled=1)
    scene.show(*(free(name, i + 1, 4, step=8, unreachable=("c",)) for i, name in enumerate("ab")), free("c", 3, 4, 8))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "b", "c"]


def test_a_newcomer_takes_the_place_of_a_node_that_is_not_reached() -> None:
    """Though that is a survivor: a round with it would be formed in vain."""
    pair = [node(name, i + 1, acknowledged=3, reported=3) for i, name in enumerate("ac")]
    scene = Scene(limits=IN_PLACE).show(*pair).adopt(round_of(3, pair, RoundState.BROKEN))
    scene.show(free("a", 1, 3, unreachable=("c",)), free("c", 3, 3, unreachable=("a",)), node("x", 50))
    formed = made(scene.decide(), Action.FORM)
    assert (names(formed), formed.left_out) == (["a", "x"], "c")


def test_two_that_are_both_needed_wait_until_they_reach_each_other() -> None:
    """Rounds in vain would end the run: a network that fails for a minute must not."""
    pair = [node(name, i + 1, acknowledged=3, reported=3) for i, name in enumerate("ac")]
    scene = Scene(limits=IN_PLACE).show(*pair).adopt(round_of(3, pair, RoundState.BROKEN))
    scene.show(free("a", 1, 3, unreachable=("c",)), free("c", 3, 3, unreachable=("a",)))
    waiting = scene.decide(after_s=3600.0)
    assert (waiting.action, waiting.reason) == (
        Action.WAIT,
        "nodes a and c cannot reach each other, and both are needed",
    )
    scene.show(free("c", 3, 3))
    assert names(made(scene.decide(), Action.FORM)) == ["a", "c"]


# ---- members that do not answer


def suspected(*more: NodeView) -> Scene:
    """Round 3 of a, b and c was broken since c did not answer; ``a`` and ``b`` are free."""
    scene = trio(RoundState.BROKEN, 3, ghosts=(node("c", 3).ghost,), cause=Cause.CONTACT_LOST)
    scene.show(free("a", 1, 3), free("b", 2, 3), *more)
    return scene


def test_who_does_not_answer_is_not_waited_for() -> None:
    """Its lease stands. It gets a moment to show that it lives, and the next round is formed without it."""
    scene = suspected()
    waiting = scene.decide()
    assert (waiting.action, waiting.reason) == (Action.WAIT, "waiting for c to be free")
    formed = made(scene.decide(after_s=2 * IN_PLACE.suspect_grace_s), Action.FORM)
    assert (names(formed), formed.reason, formed.cause) == (["a", "b"], "node c was lost", Cause.NODE_LOST)
    assert formed.ghosts == (node("c", 3).ghost,)


def test_who_does_not_answer_gets_twice_the_time_that_the_others_took() -> None:
    """On a busy machine all are late; at most a second."""
    for took_s, waited_s, forms in ((0.3, 0.29, False), (0.3, 0.31, True), (3600.0, 0.0, True)):
        scene = suspected(acknowledged("b", 2, 3))
        scene.decide(after_s=took_s)
        scene.show(free("b", 2, 3)).decide()
        assert (scene.decide(after_s=waited_s).action is Action.FORM) == forms, (took_s, waited_s)


def test_whoever_writes_is_suspected_no_more() -> None:
    """It stays in the run, and its workers are waited for as anybody's."""
    scene = suspected(acknowledged("c", 3, 3))
    assert scene.decide(after_s=1.0).reason == "waiting for c to be free"
    scene.show(free("c", 3, 3))
    formed = made(scene.decide(), Action.FORM)
    assert (names(formed), formed.ghosts) == (["a", "b", "c"], ())


def test_a_decider_that_does_not_answer_is_passed_by() -> None:
    """The next in line acts without delay."""
    scene = trio(RoundState.BROKEN, 3, ghosts=(node("a", 1).ghost,))
    scene.me = "b"
    scene.show(free("b", 2, 3), free("c", 3, 3))
    assert names(made(scene.decide(after_s=2 * IN_PLACE.suspect_grace_s), Action.FORM)) == ["b", "c"]


def test_a_worker_that_stands_still_is_not_waited_for() -> None:
    """Its agent has said so. The next round names what was found, and the node may come back with the next report."""
    why = "worker 0 of node c hangs: its process is stopped"
    scene = trio(RoundState.BROKEN, 3, reason=why, cause=Cause.WORKER_HUNG)
    scene.show(free("a", 1, 3), free("b", 2, 3), acknowledged("c", 3, 3, stuck=True))
    formed = made(scene.decide(), Action.FORM)
    assert (names(formed), formed.reason, formed.cause) == (["a", "b"], why, Cause.WORKER_HUNG)
    scene.adopt(formed)
    scene.show(node("c", 3, mod=150, acknowledged=4, stuck=True))
    scene.decide()
    assert scene.decide(after_s=6.0).action is Action.WAIT  # nobody would come into the round that names it
    scene.show(node("c", 3, mod=200, acknowledged=4, reported=4))
    scene.decide()
    assert names(made(scene.decide(after_s=6.0), Action.DRAIN).next) == ["a", "b", "c"]


def test_a_newcomer_whose_planned_round_lost_all_others_gets_one_of_another_number() -> None:
    """It may have begun to form the planned round already, and would never enter another of the same number (found by
    the simulation: the only member's lease ended while a node joined)."""
    only, newcomer = node("a", 1), node("b", 2)
    planned = round_of(2, [only, newcomer])
    scene = Scene(me="b", limits=replace(IN_PLACE, min_nodes=1)).show(only, newcomer)
    scene.adopt(round_of(1, [only], RoundState.DRAINING, next=planned)).lose("a")
    scene.decide()
    formed = made(scene.decide(after_s=5.0), Action.FORM)
    assert (formed.number, names(formed)) == (3, ["b"])


# ---- only some sizes


EVEN = replace(IN_PLACE, sizes=(2, 4))


def test_of_three_survivors_two_go_on_and_the_newest_step_is_with_them() -> None:
    """The last stands by, unless it alone holds the newest step; it comes back when two more make four."""
    for ahead, expected in (("a", ["a", "b"]), ("c", ["a", "c"])):
        scene = trio(RoundState.BROKEN)
        scene.limits = EVEN
        scene.show(*(free(name, i + 1, 1, step=8 if name == ahead else 7) for i, name in enumerate("abc")))
        assert names(made(scene.decide(), Action.FORM)) == expected


def test_newcomers_stand_by_until_there_are_enough_for_the_next_size() -> None:
    """Two train, and a third changes nothing; with a fourth both are taken in at once."""
    pair = [node(name, i + 1, acknowledged=1, reported=1) for i, name in enumerate("ab")]
    scene = Scene(limits=EVEN).show(*pair).adopt(round_of(1, pair)).show(node("x", 50))
    assert scene.decide(after_s=3600.0).reason == "all is well"
    scene.show(node("y", 51))
    assert names(made(scene.decide(after_s=1.0), Action.DRAIN).next) == ["a", "b", "x", "y"]


def test_survivors_in_the_middle_of_a_call_are_as_many_as_they_are_until_it_is_over() -> None:
    """None can be spared there; then a planned change, which saves, brings an allowed number."""
    scene = trio(RoundState.BROKEN)
    scene.limits = EVEN
    scene.show(*(free(name, i + 1, 1, joinable=False) for i, name in enumerate("abc")))
    together = made(scene.decide(), Action.FORM)
    assert names(together) == ["a", "b", "c"]
    drain = made(scene.adopt(together).decide(), Action.DRAIN)
    assert (drain.next, drain.reason) == (None, "a round may have 2 nodes")
    scene.show(*(free(name, i + 1, 2, planned=True) for i, name in enumerate("abc"))).adopt(drain)
    assert names(made(scene.decide(), Action.FORM)) == ["a", "b"]


def nodes(**unreachable: tuple[str, ...]) -> list[NodeView]:
    """Nodes in rank order, with whom each could not reach."""
    return [node(name, rank + 1, unreachable=names) for rank, (name, names) in enumerate(unreachable.items())]


def name_of(found: NodeView | None) -> str | None:
    return None if found is None else found.id


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (nodes(a=(), b=(), c=()), None),
        (nodes(a=("c",), b=("c",), c=("a", "b")), "c"),
        (nodes(a=("b", "c"), b=("a",), c=("a",)), "a"),
        (nodes(a=(), b=("c",), c=("b",)), "c"),  # of equals the last: who came first stays
        (nodes(a=("x",), b=("x",), c=()), None),  # x is not among them anyway
        (nodes(a=("a",), b=("c",), c=("b",)), "a"),  # who names itself knows better than the others
        (nodes(a=("a",), b=("b",), c=()), "b"),
    ],
)
def test_the_node_that_most_others_cannot_reach_is_left_out(ready: list[NodeView], expected: str | None) -> None:
    """Whoever is named by most; the last in rank order where several are."""
    assert name_of(left_out(ready, FAILED_ROUNDS)) == expected


def test_one_round_that_failed_is_no_reason() -> None:
    """Where only one side says so: the other may have been slow, or has died, which is found by other means."""
    assert left_out(nodes(a=("c",), b=("c",), c=()), FAILED_ROUNDS - 1) is None


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (nodes(a=("c",), b=(), c=("a",)), "c"),
        (nodes(a=("b", "c"), b=("a",), c=("a",)), "a"),
        (nodes(a=("b", "c"), b=(), c=("a",)), "c"),  # b was only slow
    ],
)
def test_two_that_name_each_other_do_not_form_a_round_in_vain(ready: list[NodeView], expected: str) -> None:
    """The one that fewer reach is left out at once; of equals the last."""
    assert name_of(left_out(ready, 0)) == expected


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
    """Nobody is blamed on a guess."""
    assert blamed(tried, {name: node(name, 1, address=address).record for name, address in others.items()}) == expected


def test_the_sentence_names_both_nodes_the_address_and_whose_it_is() -> None:
    """And what to check."""
    assert cannot_reach("a", "b", "10.0.0.2", "10.0.0.2", "timed out") == (
        "node a cannot reach node b at 10.0.0.2, which b announces (timed out); to check, run 'elastic-trainer doctor"
        " --endpoint HOST:2379 --run-id check --peers 2' on both"
    )
    other = cannot_reach("a", "b", "10.0.0.2", "127.0.0.1", "refused")
    assert "at 127.0.0.1, which its worker published, while its agent announces 10.0.0.2 (refused)" in other


PAIRS = replace(IN_PLACE, min_nodes=2, max_nodes=6, sizes=(2, 4, 6), shard_nodes=2)


def at(name: str, created: int, **record: Any) -> NodeView:
    """A ready node called after its place: "a0" has place 0."""
    return node(name, created, place=int(name[-1]), **record)


def training(*members: str, **more: Any) -> Scene:
    """A round of these."""
    nodes = [at(name, i + 1, acknowledged=1, reported=1) for i, name in enumerate(members)]
    return Scene(me=members[0], limits=PAIRS).show(*nodes).adopt(round_of(1, nodes, **more))


def over(*members: str, lost: str = "", **more: Any) -> Scene:
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
    formed = made(over("a0", "a1", "b0", "b1", lost="a1").decide(), Action.FORM)
    assert groups(formed) == ["b0 b1"]
    scene = over("a0", "a1", "b0", "b1", lost="a1").adopt(formed)
    assert scene.decide(after_s=3600.0).reason == "all is well"
    scene.show(at("x1", 50))
    assert groups(made(scene.decide(after_s=6.0), Action.DRAIN).next) == ["b0 b1", "a0 x1"]


def test_survivors_of_two_broken_groups_are_one_whole_group_at_once() -> None:
    """In the next round, behind the groups that nobody has left."""
    scene = over("a0", "a1", "b0", "b1", "c0", "c1", lost="a1 b0")
    assert groups(made(scene.decide(), Action.FORM)) == ["c0 c1", "a0 b1"]


def test_too_few_for_a_group_wait_for_the_place_that_is_missing() -> None:
    """Two survivors of one place make no group, and what is missing is said; a newcomer makes one at once."""
    scene = over("a0", "a1", "b0", "b1", lost="a1 b1")
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
    scene = over("a0", "a1", "b0", "b1")
    scene.limits = replace(PAIRS, max_nodes=2, sizes=(2,))
    scene.show(free("b1", 4, 1, step=8, place=1))
    assert groups(made(scene.decide(), Action.FORM)) == ["b0 b1"]


def test_survivors_in_a_call_take_no_newcomer_into_their_groups() -> None:
    """A spare of theirs waits; without any whole group all do, and then one begins anew."""
    scene = over("a0", "a1", "b0", "b1", lost="a1", joinable=False).show(at("x1", 50))
    assert groups(made(scene.decide(), Action.FORM)) == ["b0 b1"]
    scene = over("a0", "a1", lost="a1", joinable=False).show(at("x1", 50))
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
