"""The membership rules, clause by clause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.rules import Action, broken
from elastic_trainer.model import Cause
from tests.unit.membership.scenes import LIMITS, Scene, node, round_of


def test_first_round_forms_at_once_when_all_of_max_are_there() -> None:
    """Nothing is waited for when no further node could be taken in."""
    scene = Scene().show(*(node(name, i + 1) for i, name in enumerate("abcd")))
    decision = scene.decide()
    assert decision.action is Action.FORM
    assert decision.round is not None
    assert [member.node for member in decision.round.members] == list("abcd")
    assert decision.round.number == 1
    assert decision.round.nonce == "fresh"


def test_one_node_is_spoken_of_as_one() -> None:
    """Reasons are read by people: not "1 nodes are present"."""
    one = replace(LIMITS, min_nodes=1, max_nodes=1)
    assert Scene(limits=one).show(node("a", 1)).decide().reason == "the only node is present"
    more = Scene(limits=replace(one, max_nodes=4)).show(node("a", 1))
    assert more.decide(after_s=600.0).reason == "1 node is present and the last call is over"


def test_first_round_waits_for_min_nodes() -> None:
    """One node of at least two forms nothing, however long it waits."""
    scene = Scene().show(node("a", 1))
    assert scene.decide(after_s=3600.0).action is Action.WAIT


def test_first_round_gives_a_last_call_that_each_newcomer_renews() -> None:
    """At min nodes the last call runs; a third node renews it; then the round forms with three."""
    scene = Scene().show(node("a", 1), node("b", 2))
    waiting = scene.decide(after_s=2.0)
    assert waiting.action is Action.WAIT
    assert waiting.again_in_s == 1.0
    scene.show(node("c", 3))
    assert scene.decide(after_s=2.9).action is Action.WAIT
    decision = scene.decide(after_s=0.2)
    assert decision.action is Action.FORM
    assert decision.round is not None
    assert len(decision.round.members) == 3


def test_last_call_is_bounded_in_total() -> None:
    """Newcomers that trickle in for ever cannot keep the job from starting."""
    limits = replace(LIMITS, max_nodes=100, last_call_limit_s=10.0)
    scene = Scene(limits=limits).show(node("a", 1), node("b", 2))
    formed = False
    for i in range(10):
        scene.show(node(f"n{i}", 10 + i))
        formed = scene.decide(after_s=2.0).action is Action.FORM
        if formed:
            break
    assert formed
    assert scene.now <= 100.0 + 12.0


def test_warming_nodes_are_not_taken_in() -> None:
    """A node whose workers are still starting does not count."""
    scene = Scene().show(node("a", 1), node("b", 2, state=NodeState.WARMING))
    assert scene.decide(after_s=60.0).action is Action.WAIT


def test_deputies_act_only_after_their_delay() -> None:
    """The most senior node decides; the second acts when nothing has happened for its delay."""
    nodes = [node(name, i + 1) for i, name in enumerate("abcd")]
    deputy = Scene(me="b").show(*nodes)
    waiting = deputy.decide()
    assert waiting.action is Action.WAIT
    assert waiting.again_in_s == LIMITS.deputy_delay_s
    assert deputy.decide(after_s=0.26).action is Action.FORM


def test_node_without_a_key_decides_nothing() -> None:
    """A fenced node keeps still."""
    scene = Scene(me="z").show(*(node(name, i + 1) for i, name in enumerate("abcd")))
    assert scene.decide(after_s=60.0).action is Action.WAIT


def test_lost_lease_breaks_the_round_and_the_survivors_form_the_next() -> None:
    """A member's key is gone: break; when the survivors are free: form, in their old order."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*nodes).adopt(round_of(7, nodes))
    scene.lose("b")
    decision = scene.decide()
    assert decision.action is Action.BREAK
    assert "node b is gone" in decision.reason
    scene.adopt(decision.round)
    assert scene.decide().action is Action.WAIT
    scene.show(node("c", 3, mod=11, life=2, acknowledged=8, reported=8, planned=True))
    assert scene.decide().action is Action.WAIT
    scene.show(node("a", 1, mod=12, life=2, acknowledged=8, reported=8, planned=True))
    formed = scene.decide()
    assert formed.action is Action.FORM
    assert formed.round is not None
    assert formed.round.number == 8
    assert [member.node for member in formed.round.members] == ["a", "c"]


def test_worker_failure_breaks_the_round_and_the_node_comes_back_with_its_rank() -> None:
    """A node whose workers failed announces a new life unplanned; all come back, rank order unchanged."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*nodes).adopt(round_of(3, nodes))
    scene.show(node("b", 2, mod=9, life=2, acknowledged=4, reported=4, cause="its workers failed"))
    decision = scene.decide()
    assert decision.action is Action.BREAK
    assert decision.reason == "node b left the round: its workers failed"
    scene.adopt(decision.round)
    scene.show(
        *(
            node(name, i + 1, mod=20 + i, life=2, acknowledged=4, reported=4, planned=True)
            for i, name in ((0, "a"), (2, "c"))
        )
    )
    formed = scene.decide()
    assert formed.action is Action.FORM
    assert formed.round is not None
    assert [(m.node, m.life, m.first_rank) for m in formed.round.members] == [("a", 2, 0), ("b", 2, 1), ("c", 2, 2)]


def test_silent_member_found_dead_is_left_out_as_a_ghost() -> None:
    """A refused probe replaces the wait for the lease; the key left behind counts for nothing until it changes."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*nodes).adopt(round_of(1, nodes, RoundState.BROKEN))
    scene.show(
        *(
            node(name, i + 1, mod=20 + i, life=2, acknowledged=2, reported=2, planned=True)
            for i, name in ((0, "a"), (1, "b"))
        )
    )
    assert scene.decide(after_s=5.0).action is Action.WAIT
    scene.suspects = frozenset({"c"})
    formed = scene.decide()
    assert formed.action is Action.FORM
    assert formed.round is not None
    assert [member.node for member in formed.round.members] == ["a", "b"]
    assert formed.round.ghosts == (node("c", 3).ghost,)
    scene.suspects = frozenset()
    scene.adopt(formed.round)
    assert scene.decide(after_s=60.0).reason == "all is well"
    scene.show(node("c", 3, mod=30, life=2, acknowledged=2, reported=2))
    assert scene.decide(after_s=6.0).action is Action.DRAIN


def test_dead_most_senior_node_does_not_block_its_deputy() -> None:
    """With its leader found dead the next node decides at once, without waiting for the lease."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene(me="b", suspects=frozenset({"a"})).show(*nodes).adopt(round_of(1, nodes, RoundState.BROKEN))
    scene.show(
        *(
            node(name, i + 1, mod=20 + i, life=2, acknowledged=2, reported=2, planned=True)
            for i, name in ((1, "b"), (2, "c"))
        )
    )
    formed = scene.decide()
    assert formed.action is Action.FORM
    assert formed.round is not None
    assert [(m.node, m.first_rank) for m in formed.round.members] == [("b", 0), ("c", 1)]


def test_silent_member_is_waited_for_no_longer_than_the_grace() -> None:
    """A live agent whose workers never end cannot hold the others for ever."""
    nodes = [node(name, i + 1) for i, name in enumerate("abc")]
    scene = Scene().show(*nodes).adopt(round_of(1, nodes, RoundState.BROKEN))
    scene.show(
        *(
            node(name, i + 1, mod=20 + i, life=2, acknowledged=2, reported=2, planned=True)
            for i, name in ((0, "a"), (1, "b"))
        )
    )
    assert scene.decide(after_s=LIMITS.regroup_grace_s - 1.0).action is Action.WAIT
    assert scene.decide(after_s=1.1).action is Action.FORM


def test_below_min_the_survivors_wait_and_a_newcomer_completes_them() -> None:
    """One survivor of two is not enough; a newcomer makes the round form at once, behind the survivor."""
    nodes = [node("a", 1), node("b", 2)]
    scene = Scene().show(node("a", 1, mod=9, life=2, acknowledged=2, reported=2, planned=True))
    scene.adopt(round_of(1, nodes, RoundState.BROKEN))
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    scene.show(node("x", 50))
    formed = scene.decide()
    assert formed.action is Action.FORM
    assert formed.round is not None
    assert [member.node for member in formed.round.members] == ["a", "x"]


def test_newcomers_are_collected_before_a_planned_change() -> None:
    """A newcomer below max opens the round after the batch time and the least interval; spares above max do not."""
    nodes = [node("a", 1), node("b", 2)]
    scene = Scene().show(*nodes).adopt(round_of(1, nodes))
    assert scene.decide(after_s=1.0).action is Action.WAIT
    scene.show(node("x", 50))
    assert scene.decide(after_s=2.0).action is Action.WAIT
    decision = scene.decide(after_s=3.0)
    assert decision.action is Action.DRAIN
    assert decision.round is not None
    assert decision.round.state is RoundState.DRAINING
    assert decision.reason == "node x joins"


def test_nodes_above_max_wait_as_spares_and_replace_a_lost_node() -> None:
    """A fifth node of at most four waits; when a member is lost it takes part in the next round."""
    nodes = [node(name, i + 1) for i, name in enumerate("abcd")]
    scene = Scene().show(*nodes, node("e", 5)).adopt(round_of(1, nodes))
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    scene.lose("d")
    broken = scene.decide()
    assert broken.action is Action.BREAK
    scene.adopt(broken.round)
    scene.show(
        *(
            node(name, i + 1, mod=20 + i, life=2, acknowledged=2, reported=2, planned=True)
            for i, name in enumerate("abc")
        )
    )
    formed = scene.decide()
    assert formed.round is not None
    assert [member.node for member in formed.round.members] == list("abce")


def test_spare_that_waited_through_many_rounds_is_still_free() -> None:
    """A spare's acknowledgement is old; it takes part all the same."""
    nodes = [node("a", 1, acknowledged=6, reported=6), node("b", 2, acknowledged=6, reported=6)]
    scene = Scene(limits=replace(LIMITS, max_nodes=3)).show(*nodes, node("e", 5)).adopt(round_of(6, nodes))
    assert scene.decide(after_s=10.0).action is Action.DRAIN


def test_run_closes_as_succeeded_when_all_members_are_done() -> None:
    """Done members stay until the last one is done; then the run is closed with its result."""
    nodes = [node("a", 1), node("b", 2)]
    scene = Scene().show(*nodes).adopt(round_of(4, nodes))
    scene.show(node("b", 2, mod=9, state=NodeState.DONE))
    assert scene.decide(after_s=60.0).action is Action.WAIT
    scene.show(node("a", 1, mod=10, state=NodeState.DONE))
    decision = scene.decide()
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.SUCCEEDED
    scene.adopt(decision.round)
    assert scene.decide(after_s=60.0).action is Action.WAIT


def test_loss_of_another_node_after_rank_0_is_done_does_not_undo_the_success() -> None:
    """Results are committed by rank 0: its success decides."""
    nodes = [node("a", 1), node("b", 2)]
    scene = Scene().show(node("a", 1, mod=9, state=NodeState.DONE)).adopt(round_of(4, nodes))
    decision = scene.decide()
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.SUCCEEDED
    assert "b did not finish" in decision.reason


def test_failure_of_rank_0_after_others_are_done_fails_the_run() -> None:
    """A finished rank cannot train again, so no round without rank 0's result is formed: the run has failed."""
    nodes = [node("a", 1), node("b", 2)]
    scene = Scene(me="b").show(
        node("a", 1, mod=9, life=2, acknowledged=5, reported=5), node("b", 2, mod=8, state=NodeState.DONE)
    )
    scene.adopt(round_of(4, nodes))
    decision = scene.decide(after_s=1.0)
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.FAILED


def test_closed_run_stays_closed() -> None:
    """New nodes change nothing."""
    nodes = [node("a", 1), node("b", 2)]
    closed = round_of(4, nodes, RoundState.CLOSED, result=RunResult.SUCCEEDED)
    scene = Scene().show(*nodes, node("c", 3), node("d", 4)).adopt(closed)
    assert scene.decide(after_s=3600.0).action is Action.WAIT


def test_round_without_any_live_member_is_followed_by_first_round_rules() -> None:
    """All nodes died and came back under new keys: the number goes on."""
    old = [node("a", 1), node("b", 2)]
    scene = Scene().show(node("a", 21), node("b", 22)).adopt(round_of(9, old))
    assert scene.decide(after_s=1.0).action is Action.WAIT
    decision = scene.decide(after_s=3.0)
    assert decision.action is Action.FORM
    assert decision.round is not None
    assert decision.round.number == 10


def test_several_workers_per_node_get_contiguous_ranks() -> None:
    """First ranks are cumulative over unequal nodes."""
    scene = Scene(limits=replace(LIMITS, max_nodes=3)).show(
        node("a", 1, size=2), node("b", 2, size=4), node("c", 3, size=1)
    )
    decision = scene.decide()
    assert decision.round is not None
    assert [member.first_rank for member in decision.round.members] == [0, 2, 6]
    assert decision.round.world_size == 7


TRIO = [node(name, i + 1) for i, name in enumerate("abc")]


def back(name: str, created: int, *, planned: bool, **record: Any) -> NodeView:
    """The life after round 7."""
    return node(name, created, mod=20 + created, life=2, acknowledged=8, reported=8, planned=planned, **record)


def ended(cause: Cause | None, state: RoundState = RoundState.BROKEN) -> Scene:
    """Round 7 is over; a and c have left it by agreement."""
    scene = Scene().show(*TRIO).adopt(round_of(7, TRIO, state, cause=cause, reason="told"))
    return scene.show(back("a", 1, planned=True), back("c", 3, planned=True))


def next_round(scene: Scene) -> RoundDocument:
    decision = scene.decide()
    assert decision.action is Action.FORM, decision
    assert decision.round is not None
    return decision.round


def test_a_node_whose_lease_ended_breaks_the_round_as_lost() -> None:
    """And the next round says so, too."""
    scene = Scene().show(*TRIO).adopt(round_of(7, TRIO)).lose("b")
    decision = scene.decide()
    assert decision.round is not None
    assert (decision.action, decision.round.cause) == (Action.BREAK, Cause.NODE_LOST)
    scene.adopt(decision.round).show(back("a", 1, planned=True), back("c", 3, planned=True))
    assert next_round(scene).cause is Cause.NODE_LOST


@pytest.mark.parametrize("cause", [Cause.WORKER_LOST, Cause.WORKER_HUNG, Cause.CONTACT_LOST, Cause.STALLED])
def test_a_node_that_is_gone_was_the_cause_whatever_was_reported_first(cause: Cause) -> None:
    """Its peers lose contact before its lease ends."""
    document = next_round(ended(cause).lose("b"))
    assert (document.cause, document.reason) == (Cause.NODE_LOST, "node b was lost")


@pytest.mark.parametrize("first", [Cause.CONTACT_LOST, Cause.NODE_LOST])
@pytest.mark.parametrize("state", [NodeState.WARMING, NodeState.READY])
def test_a_worker_that_failed_was_the_cause_if_others_noticed_first(first: Cause, state: NodeState) -> None:
    """Its node starts it again, or has done so."""
    scene = ended(first).show(back("b", 2, planned=False, state=state))
    assert next_round(scene).cause is Cause.WORKER_LOST
    scene = ended(first).show(back("b", 2, planned=False, state=state, ended_by=Cause.WORKER_HUNG))
    assert next_round(scene).cause is Cause.WORKER_HUNG


@pytest.mark.parametrize("cause", [Cause.WORKER_LOST, Cause.WORKER_HUNG, Cause.STALLED])
def test_what_the_agent_of_the_worker_reported_stays(cause: Cause) -> None:
    """It knows why it ended it."""
    document = next_round(ended(cause).show(back("b", 2, planned=False)))
    assert (document.cause, document.reason) == (cause, "told")


def test_contact_that_was_lost_with_nobody_dead_is_that() -> None:
    """All have left by agreement."""
    scene = ended(Cause.CONTACT_LOST).show(back("b", 2, planned=True))
    assert next_round(scene).cause is Cause.CONTACT_LOST


def test_a_node_that_lost_its_lease_and_came_back_was_lost() -> None:
    """Its key is another, though its name is the same."""
    scene = ended(Cause.NODE_LOST).show(node("b", 90, life=2, planned=False))
    assert next_round(scene).cause is Cause.NODE_LOST


def test_a_planned_change_and_a_first_round_have_no_cause() -> None:
    """Nothing broke."""
    scene = ended(None, RoundState.DRAINING).show(back("b", 2, planned=True))
    assert next_round(scene).cause is None
    assert next_round(Scene().show(*TRIO, node("d", 4))).cause is None


def test_a_cause_belongs_to_one_end() -> None:
    """A round that is broken again, or behind a planned change, does not keep what was reported before."""
    planned = round_of(8, TRIO)
    draining = round_of(7, TRIO, RoundState.DRAINING, cause=Cause.WORKER_LOST, next=planned)
    document = broken(draining, "x", cause=Cause.STALLED)
    assert (document.number, document.cause) == (8, Cause.STALLED)
    assert broken(round_of(7, TRIO, cause=Cause.WORKER_LOST), "x").cause is None


def test_a_cause_is_stored_and_read() -> None:
    """And a document without one is read as well: an agent of before wrote it."""
    document = round_of(7, TRIO, cause=Cause.WORKER_HUNG)
    assert RoundDocument.decode(document.encode(), "key") == document
    without = document.encode().replace(b'"cause":"worker_hung",', b"")
    assert b"cause" not in without
    assert RoundDocument.decode(without, "key").cause is None


NODES = [node("a", 1), node("b", 2)]


def scene() -> Scene:
    """Round 4 of a and b."""
    return Scene().show(*NODES).adopt(round_of(4, NODES))


def test_members_that_are_done_under_new_keys_close_the_run() -> None:
    """All leases ended while all worked, say in a partition; they came back, finished, and nobody waits for ever."""
    returned = scene().show(node("a", 21, state=NodeState.DONE), node("b", 22, state=NodeState.DONE))
    decision = returned.decide()
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.SUCCEEDED
    assert decision.reason == "all nodes have finished"


def test_a_member_that_works_on_under_a_new_key_is_waited_for() -> None:
    """Rank 0 is done; its neighbour's lease was replaced, but its life is the same and has not ended."""
    waiting = scene().show(node("a", 1, mod=9, state=NodeState.DONE), node("b", 22))
    decision = waiting.decide(after_s=60.0)
    assert decision.action is Action.WAIT
    assert decision.reason == "waiting for b to finish"


def test_a_later_life_under_a_new_key_is_not_waited_for() -> None:
    """The neighbour's workers have failed meanwhile: rank 0's success stands."""
    over = scene().show(node("a", 21, state=NodeState.DONE), node("b", 22, life=2, acknowledged=5, reported=5))
    decision = over.decide()
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.SUCCEEDED


def test_without_rank_0_the_others_begin_again() -> None:
    """Nobody of the round is left under its old key and rank 0 is not done: those that are ready form a new round."""
    fresh = scene().show(
        node("a", 21, life=2, acknowledged=5, reported=5), node("b", 22, state=NodeState.DONE), node("c", 23)
    )
    decision = fresh.decide(after_s=4.0)
    assert decision.action is Action.FORM
    assert decision.round is not None
    assert [member.node for member in decision.round.members] == ["a", "c"]


def test_a_run_whose_ranks_have_all_passed_the_end_succeeds_whoever_leaves() -> None:
    """Rank 0's node leaves by plan, or dies, while its script exports: no round is broken and nothing is waited for but
    the scripts of the others; a replacement waits with them."""
    over = Scene(me="b").show(node("b", 2, passed=True), node("n", 30)).adopt(round_of(4, NODES))
    assert over.decide(after_s=60.0).reason == "waiting for b to finish"
    over.show(node("b", 2, state=NodeState.DONE, passed=True))
    decision = over.decide()
    assert decision.action is Action.CLOSE
    assert decision.round is not None
    assert decision.round.result is RunResult.SUCCEEDED
    assert decision.reason == "a did not finish, but all ranks had passed the end of the training"


def test_what_a_node_of_another_epoch_has_passed_does_not_end_a_reopened_run() -> None:
    """It is still on its way out; the reopened run names no member yet."""
    reopened = Scene().show(*NODES, node("old", 9, state=NodeState.DONE, passed=True))
    decision = reopened.adopt(round_of(7, [], RoundState.BROKEN)).decide(after_s=4.0)
    assert decision.action is not Action.CLOSE


def test_a_reopened_run_without_members_has_no_head() -> None:
    """Its document names nobody: the first-round rules apply."""
    empty = Scene().show(*NODES, node("c", 3), node("d", 4)).adopt(round_of(7, [], RoundState.BROKEN))
    decision = empty.decide()
    assert decision.action is Action.FORM
    assert decision.round is not None
    assert decision.round.number == 8
