"""What the core does itself beside the rules: what it says once, and what it waits for."""

from __future__ import annotations

import random

from elastic_trainer.membership.core import CommitRound, Core, Ended, Looked, Notify, TurnOutcome
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.rules import Action
from elastic_trainer.membership.view import Observation

from .scenes import LIMITS, node, round_of

PAIR = [node("a", 1), node("b", 2)]
REVISION = 7


def step(core: Core, document: RoundDocument | None, now: float, *answers: Ended, serial: int = 1) -> TurnOutcome:
    """Nodes a and b and ``document`` are seen, always at one revision of the store."""
    nodes = {each.id: each for each in PAIR}
    seen = Observation(nodes, document, REVISION if document else 0, True, serial, revision=REVISION)
    return core.step([*answers, Looked(seen, create_revision=1, senior=True, away=False)], now)


def told(taken: TurnOutcome) -> list[RoundDocument]:
    return [effect.document for effect in taken.effects if isinstance(effect, Notify)]


def core() -> Core:
    return Core("a", LIMITS, 3.0, random.Random(1))


def test_the_end_of_a_round_is_reported_though_its_revision_is_that_of_another() -> None:
    """A store that was restored uses its revisions again: the end that is put back may get the one of the round."""
    mine = core()
    active, broken = round_of(4, PAIR), round_of(4, PAIR, RoundState.BROKEN)
    assert told(step(mine, active, 1.0)) == [active]
    assert told(step(mine, active, 1.1)) == []
    assert told(step(mine, broken, 1.2)) == [broken]


def test_a_write_that_lost_its_compare_is_tried_again_when_something_is_new_or_after_a_while() -> None:
    """Until then the same view would lead to the same write; the time of the next look is given."""
    mine = core()
    step(mine, None, 1.0)
    (commit,) = step(mine, None, 1.0 + LIMITS.last_call_s).effects
    assert isinstance(commit, CommitRound)
    assert commit.decision.action is Action.FORM
    lost = Ended(commit, again_in_s=0.1)
    assert step(mine, None, 5.0, lost) == TurnOutcome((), 5.1)
    assert [type(effect) for effect in step(mine, None, 5.05, serial=2).effects] == [CommitRound]
