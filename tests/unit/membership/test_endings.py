"""The end of a run whose members lost their leases on the way: what they have done still counts."""

from __future__ import annotations

from elastic_trainer.membership.documents import NodeState, RoundState, RunResult
from elastic_trainer.membership.rules import Action

from .scenes import Scene, node, round_of

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
