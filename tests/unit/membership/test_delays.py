"""Why a broken round has no successor yet is said once for each reason that lasts."""

from __future__ import annotations

from elastic_trainer.membership.core import MIN_DELAY_S, Delays, LogDelay
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.membership.rules import Action, Decision

from .scenes import node, round_of

BROKEN = round_of(4, [node("a", 1)], RoundState.BROKEN)
SAVES = Decision(Action.WAIT, "waiting for b (in checkpoint) to be free")


def test_a_reason_that_lasts_is_said_once() -> None:
    """A recovery that takes no time says nothing; neither does a wait for anything but a broken round's successor."""
    delays = Delays()
    active = BROKEN.model_copy(update={"state": RoundState.ACTIVE})
    notes = [
        (BROKEN, SAVES, 10.0),
        (BROKEN, Decision(Action.FORM, "all are free", BROKEN), 10.1),
        (BROKEN, SAVES, 20.0),
    ]
    notes += [(active, SAVES, 20.0 + after_s) for after_s in (0.1, MIN_DELAY_S, 2 * MIN_DELAY_S)]
    assert [delays.note(*note) for note in notes] == [None] * len(notes)
    said = [delays.note(BROKEN, SAVES, 30.0 + after_s) for after_s in (0.0, MIN_DELAY_S, 2 * MIN_DELAY_S)]
    assert said == [None, LogDelay(4, SAVES.reason), None]
