"""The membership rules, clause by clause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.rules import Action, broken
from elastic_trainer.model import Cause
from tests.unit.membership.scenes import LIMITS, Scene, names, node, outcome, round_of

TRIO = [node(name, i + 1) for i, name in enumerate("abc")]
PAIR = TRIO[:2]


def back(name: str, created: int, number: int = 7, **record: Any) -> NodeView:
    """The life after round ``number``, which its workers have left by agreement."""
    values: dict[str, Any] = {"life": 2, "acknowledged": number + 1, "reported": number + 1, "planned": True} | record
    return node(name, created, mod=20 + created, **values)


def over(state: RoundState = RoundState.BROKEN, **more: Any) -> Scene:
    """Round 7 of a, b and c is over."""
    return Scene().show(*TRIO).adopt(round_of(7, TRIO, state, **more))


# ---- the first round


def test_the_first_round_forms_at_once_when_all_of_max_are_there() -> None:
    scene = Scene(limits=replace(LIMITS, max_nodes=3))
    formed = scene.show(node("a", 1, size=2), node("b", 2, size=4), node("c", 3)).forms()
    assert (names(formed), formed.number, formed.nonce) == ("a b c", 1, "fresh")
    assert [member.first_rank for member in formed.members] == [0, 2, 6], "ranks are contiguous over unequal nodes"
    assert formed.world_size == 7


def test_the_first_round_waits_for_min_nodes_and_gives_a_last_call_that_each_newcomer_renews() -> None:
    """Nodes whose workers are still starting do not count. Reasons are read by people: not "1 nodes are present"."""
    scene = Scene().show(node("a", 1), node("b", 2, state=NodeState.WARMING))
    assert scene.said(after_s=3600.0) == "1 of at least 2 nodes are ready"
    assert scene.show(node("b", 2)).decide(after_s=2.0).again_in_s == 1.0
    scene.show(node("c", 3))
    assert scene.said(after_s=2.9) == "last call for more nodes"
    assert scene.said(after_s=0.2) == "form 1: a b c"
    one = replace(LIMITS, min_nodes=1, max_nodes=1)
    assert Scene(limits=one).show(node("a", 1)).decide().reason == "the only node is present"
    more = Scene(limits=replace(one, max_nodes=4)).show(node("a", 1))
    assert more.decide(after_s=600.0).reason == "1 node is present and the last call is over"


def test_last_call_is_bounded_in_total() -> None:
    scene = Scene(limits=replace(LIMITS, max_nodes=100, last_call_limit_s=10.0)).show(*PAIR)
    while scene.show(node(f"n{scene.now}", int(scene.now))).decide(after_s=2.0).action is Action.WAIT:
        assert scene.now <= 100.0 + 12.0


def test_deputies_act_only_after_their_delay_and_a_node_without_a_key_never() -> None:
    """The most senior node decides; the second acts when nothing has happened for its delay, and at once where the
    first is known to be dead."""
    nodes = [*TRIO, node("d", 4)]
    deputy = Scene(me="b").show(*nodes)
    assert deputy.decide().again_in_s == LIMITS.deputy_delay_s
    assert deputy.said(after_s=0.26) == "form 1: a b c d"
    assert Scene(me="z").show(*nodes).said(after_s=60.0) == "this node is not present"
    scene = over().show(back("b", 2), back("c", 3))
    scene.me, scene.suspects = "b", frozenset({"a"})
    assert [(each.node, each.first_rank) for each in scene.forms().members] == [("b", 0), ("c", 1)]


def test_a_round_without_any_live_member_is_followed_by_first_round_rules() -> None:
    """All nodes died and came back under new keys: the number goes on. So it does behind a reopened run, whose document
    names nobody."""
    scene = Scene().show(node("a", 21), node("b", 22)).adopt(round_of(9, PAIR))
    assert scene.decide(after_s=1.0).action is Action.WAIT
    assert scene.said(after_s=3.0) == "form 10: a b"
    reopened = Scene().show(*TRIO, node("d", 4)).adopt(round_of(7, [], RoundState.BROKEN))
    assert reopened.said() == "form 8: a b c d"


# ---- losses


def test_a_lost_lease_breaks_the_round_and_the_survivors_form_the_next() -> None:
    """When they are free, in their old order. A node whose worker failed announces a new life, and comes back with
    its rank."""
    scene = Scene().show(*TRIO).adopt(round_of(7, TRIO)).lose("b")
    assert scene.follow() == "break 7: node b is gone"
    assert scene.said() == "waiting for a, c to be free"
    assert scene.show(back("c", 3)).said() == "waiting for a to be free"
    formed = scene.show(back("a", 1)).forms()
    assert (formed.number, names(formed), formed.cause) == (8, "a c", Cause.NODE_LOST)
    scene = Scene().show(*TRIO).adopt(round_of(7, TRIO)).show(back("b", 2, planned=False, cause="its workers failed"))
    assert scene.follow() == "break 7: node b left the round: its workers failed"
    formed = scene.show(back("a", 1), back("c", 3)).forms()
    assert [(m.node, m.life, m.first_rank) for m in formed.members] == [("a", 2, 0), ("b", 2, 1), ("c", 2, 2)]


def test_a_silent_member_is_waited_for_no_longer_than_the_grace_and_not_at_all_if_it_is_found_dead() -> None:
    """A refused probe replaces the wait for the lease; the key left behind counts for nothing until it changes."""
    scene = over().show(back("a", 1), back("b", 2))
    assert scene.decide(after_s=LIMITS.regroup_grace_s - 1.0).action is Action.WAIT
    assert scene.said(after_s=1.1) == "form 8: a b"
    scene = over().show(back("a", 1), back("b", 2))
    assert scene.decide(after_s=5.0).action is Action.WAIT
    scene.suspects = frozenset({"c"})
    formed = scene.forms()
    assert (names(formed), formed.ghosts) == ("a b", (TRIO[2].ghost,))
    scene.suspects = frozenset()
    assert scene.adopt(formed).said(after_s=60.0) == "all is well"
    assert scene.show(back("c", 3, planned=False)).decide(after_s=6.0).action is Action.DRAIN


def test_below_min_the_survivors_wait_and_a_newcomer_completes_them() -> None:
    scene = Scene().show(back("a", 1, 1)).adopt(round_of(1, PAIR, RoundState.BROKEN))
    assert scene.decide(after_s=3600.0).action is Action.WAIT
    assert scene.show(node("x", 50)).said() == "form 2: a x"


def test_newcomers_are_collected_before_a_planned_change() -> None:
    """After the batch time and the least interval; also one that waited through many rounds, whose acknowledgement is
    old. Spares above max wait, and replace a lost node."""
    pair = [node("a", 1, acknowledged=6, reported=6), node("b", 2, acknowledged=6, reported=6)]
    scene = Scene(limits=replace(LIMITS, max_nodes=3)).show(*pair).adopt(round_of(6, pair))
    assert scene.decide(after_s=1.0).action is Action.WAIT
    assert scene.show(node("x", 50)).decide(after_s=2.0).action is Action.WAIT
    assert scene.said(after_s=3.0) == "drain: node x joins"
    nodes = [*TRIO, node("d", 4)]
    scene = Scene().show(*nodes, node("e", 5)).adopt(round_of(7, nodes))
    assert scene.said(after_s=3600.0) == "all is well"
    scene.lose("d").follow()
    assert scene.show(*(back(name, i + 1) for i, name in enumerate("abc"))).said() == "form 8: a b c e"


# ---- what ended a round


@pytest.mark.parametrize("cause", [Cause.WORKER_LOST, Cause.WORKER_HUNG, Cause.CONTACT_LOST, Cause.STALLED])
def test_what_the_next_round_says_of_the_end(cause: Cause) -> None:
    """A node that is gone was the cause, whatever was reported first: its peers lose contact before its lease ends.
    Otherwise what the worker's own agent reported stays, and contact that was lost with nobody dead is that."""
    scene = over(cause=cause, reason="told").show(back("a", 1), back("c", 3))
    stays = scene.show(back("b", 2, planned=cause is Cause.CONTACT_LOST)).forms()
    assert (stays.cause, stays.reason) == (cause, "told")
    gone = scene.lose("b").forms()
    assert (gone.cause, gone.reason) == (Cause.NODE_LOST, "node b was lost")


@pytest.mark.parametrize("first", [Cause.CONTACT_LOST, Cause.NODE_LOST])
@pytest.mark.parametrize("state", [NodeState.WARMING, NodeState.READY])
def test_a_worker_that_failed_was_the_cause_if_others_noticed_first(first: Cause, state: NodeState) -> None:
    """Its node starts it again, or has done so. Not one that lost its lease and came back: its key is another; nor one
    whose agent has begun its workers anew."""
    scene = over(cause=first).show(back("a", 1), back("c", 3))
    for ended_by in (Cause.WORKER_LOST, Cause.WORKER_HUNG):
        scene.show(back("b", 2, planned=False, state=state, ended_by=ended_by))
        assert scene.forms().cause is ended_by
    assert scene.show(back("b", 2, planned=False, state=state)).forms().cause is first
    assert scene.show(node("b", 90, life=2, planned=False)).forms().cause is first


def test_a_cause_belongs_to_one_end() -> None:
    """A planned change and a first round have none; a round that is broken again, or behind a planned change, does not
    keep what was reported before."""
    scene = over(RoundState.DRAINING).show(*(back(name, i + 1) for i, name in enumerate("abc")))
    assert scene.forms().cause is Scene().show(*TRIO, node("d", 4)).forms().cause is None
    draining = round_of(7, TRIO, RoundState.DRAINING, cause=Cause.WORKER_LOST, next=round_of(8, TRIO))
    document = broken(draining, "x", cause=Cause.STALLED)
    assert (document.number, document.cause) == (8, Cause.STALLED)
    assert broken(round_of(7, TRIO, cause=Cause.WORKER_LOST), "x").cause is None


# ---- the end of a run

DONE: dict[str, Any] = {"state": NodeState.DONE}
LATER: dict[str, Any] = {"life": 2, "acknowledged": 5, "reported": 5}
ENDINGS: list[tuple[str, list[NodeView], str]] = [
    ("done members wait for the last", [node("a", 1), node("b", 2, **DONE)], "waiting for a to finish"),
    ("all are done", [node("a", 1, **DONE), node("b", 2, **DONE)], "close succeeded: all nodes have finished"),
    ("rank 0's success decides", [node("a", 1, **DONE)], "close succeeded: b did not finish"),
    ("rank 0 fails", [node("a", 1, **LATER), node("b", 2, **DONE)], "close failed: a did not finish"),
    ("all leases ended", [node("a", 21, **DONE), node("b", 22, **DONE)], "close succeeded: all nodes have finished"),
    ("works on under a new key", [node("a", 1, **DONE), node("b", 22)], "waiting for b to finish"),
    ("its workers have failed", [node("a", 21, **DONE), node("b", 22, **LATER)], "close succeeded: b did not finish"),
    ("no rank 0", [node("a", 21, **LATER), node("b", 22, **DONE), node("c", 23)], "form 5: a c"),
    ("passed, at work", [node("b", 2, passed=True), node("n", 30)], "waiting for b to finish"),
    (
        "passed, and done",
        [node("b", 2, passed=True, **DONE), node("n", 30)],
        "close succeeded: a did not finish, but all ranks had passed the end of the training",
    ),
]


@pytest.mark.parametrize(("nodes", "said"), [case[1:] for case in ENDINGS], ids=[case[0] for case in ENDINGS])
def test_how_a_run_ends(nodes: list[NodeView], said: str) -> None:
    """Round 4 of a and b: results are committed by rank 0, whose success decides, unless all ranks have passed the end
    of the training together: then whoever leaves or dies changes nothing. No round is formed of what is left."""
    scene = Scene(me=nodes[0].id).show(*nodes).adopt(round_of(4, PAIR))
    assert outcome(scene.decide(after_s=60.0)) == said


def test_a_closed_run_stays_closed_and_a_reopened_one_is_not_ended_by_what_was_before() -> None:
    """New nodes change nothing. A node of another epoch, on its way out, does not end the reopened run."""
    closed = round_of(4, PAIR, RoundState.CLOSED, result=RunResult.SUCCEEDED)
    assert Scene().show(*TRIO, node("d", 4)).adopt(closed).said(after_s=3600.0) == "the run is closed"
    reopened = Scene().show(*PAIR, node("old", 9, passed=True, **DONE)).adopt(round_of(7, [], RoundState.BROKEN))
    assert reopened.decide(after_s=4.0).action is not Action.CLOSE


def test_a_run_without_a_cause_in_its_document_can_be_read() -> None:
    document = round_of(7, TRIO, cause=Cause.WORKER_HUNG)
    without = document.encode().replace(b'"cause":"worker_hung",', b"")
    assert RoundDocument.decode(document.encode(), "key") == document
    assert RoundDocument.decode(without, "key").cause is None
