"""What ended a round is reported in the next one, whoever noticed first."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.membership.rules import Action, broken
from elastic_trainer.model import Cause
from tests.unit.membership.scenes import Scene, node, round_of

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
