"""A store that goes back behind what a node has seen: what is remembered, and what is written then."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.core import OTHERS_AFTER_S, RollbackGuard
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState, RunResult
from elastic_trainer.membership.rules import Action

MEMBERS = tuple(
    RoundMember(node=name, create_revision=place, life=0, first_rank=place, local_world_size=1)
    for place, name in enumerate("abcde")
)


def document(number: int, state: RoundState = RoundState.ACTIVE, nonce: str = "x", epoch: int = 1) -> RoundDocument:
    return RoundDocument(epoch=epoch, number=number, nonce=nonce, state=state, members=MEMBERS, reason="said so")


def remembered(known: RoundDocument, seen: RoundDocument | None) -> RollbackGuard:
    return RollbackGuard().advance(known, 0.0).advance(seen, 10.0)


@pytest.mark.parametrize(
    ("known", "seen"),
    [
        (document(1), document(1)),
        (document(1), document(1, RoundState.DRAINING)),
        (document(1, RoundState.DRAINING), document(1, RoundState.BROKEN)),
        (document(1, RoundState.BROKEN), document(2, nonce="y")),
        (document(1, RoundState.BROKEN), document(1, RoundState.CLOSED)),
        (document(5, RoundState.CLOSED), document(5, RoundState.BROKEN, epoch=2)),
    ],
)
def test_a_run_that_goes_on_is_never_behind(known: RoundDocument, seen: RoundDocument) -> None:
    """What becomes of a round in order, a reopened run among it, is believed and remembered."""
    after = remembered(known, seen)
    assert not after.behind
    assert after.known == seen
    assert after.decide("a", seen, 100.0).action is Action.WAIT


@pytest.mark.parametrize(
    ("known", "seen"),
    [
        (document(3), document(1)),
        (document(3), None),
        (document(3, RoundState.BROKEN), document(3)),
        (document(3), document(2, RoundState.BROKEN)),
        (document(3), document(2, RoundState.CLOSED)),
        (document(3, nonce="x"), document(3, nonce="y")),
    ],
)
def test_an_older_store_is_given_the_end_of_the_newest_round(known: RoundDocument, seen: RoundDocument | None) -> None:
    """So the next round follows on it, whatever the store held; another round under the same number counts as older."""
    after = remembered(known, seen)
    assert after.behind
    decision = after.decide("a", seen, 10.0)
    assert decision.action is Action.BREAK
    assert decision.round is not None
    assert (decision.round.number, decision.round.state, decision.round.nonce) == (3, RoundState.BROKEN, "x")
    assert "the store was rolled back" in decision.reason
    assert not after.advance(decision.round, 11.0).behind


def test_a_planned_change_that_was_under_way_counts_as_made() -> None:
    """Some workers may have switched already: what is broken is the round that it leads to."""
    known = document(3, RoundState.DRAINING).model_copy(update={"next": document(4, nonce="z")})
    decision = remembered(known, document(2)).decide("a", document(2), 10.0)
    assert decision.round is not None
    assert (decision.round.number, decision.round.nonce, decision.round.next) == (4, "z", None)


def test_a_closed_run_stays_closed() -> None:
    """A run whose end a node has seen is not opened again by a backup."""
    closed = document(3, RoundState.CLOSED).model_copy(update={"result": RunResult.SUCCEEDED})
    decision = remembered(closed, document(3)).decide("a", document(3), 10.0)
    assert (decision.action, decision.round) == (Action.CLOSE, closed)


def test_only_the_first_members_write_at_once() -> None:
    """A thousand nodes that remember the same need not all write it."""
    after = remembered(document(3), None)
    assert [after.decide(name, None, 10.0).action for name in "abcd"] == [*[Action.BREAK] * 3, Action.WAIT]
    assert after.decide("d", None, 10.0).again_in_s == OTHERS_AFTER_S
    assert after.decide("d", None, 10.0 + OTHERS_AFTER_S).action is Action.BREAK
    assert after.advance(None, 20.0).behind_since == 10.0, "the patience does not begin anew"


def test_a_node_that_has_seen_nothing_waits_for_nothing() -> None:
    """At the first look there is nothing to remember."""
    assert not RollbackGuard().advance(None, 0.0).behind
    assert RollbackGuard().decide("a", None, 0.0).action is Action.WAIT


def test_a_change_that_was_planned_in_the_store_that_went_back_counts_as_made() -> None:
    """Newcomers may have begun to form its round: no other may get that number."""
    known = document(3, RoundState.BROKEN)
    planned = document(3, RoundState.DRAINING).model_copy(update={"next": document(4, nonce="y")})
    decision = remembered(known, planned).decide("a", planned, 10.0)
    assert decision.round is not None
    assert (decision.round.number, decision.round.nonce, decision.round.state) == (4, "y", RoundState.BROKEN)
