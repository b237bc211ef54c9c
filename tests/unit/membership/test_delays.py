"""Why a broken round has no successor yet is said once for each reason that lasts."""

from __future__ import annotations

import structlog

from elastic_trainer.membership.delays import WORTH_SAYING_S, Delays
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.membership.rules import Action, Decision

from .scenes import node, round_of

BROKEN = round_of(4, [node("a", 1)], RoundState.BROKEN)
SAVES = Decision(Action.WAIT, "waiting for b (in checkpoint) to be free")


def test_a_reason_that_lasts_is_said_once() -> None:
    """A recovery that takes no time says nothing; neither does a wait for anything but a broken round's successor."""
    delays = Delays()
    with structlog.testing.capture_logs() as said:
        delays.note(BROKEN, SAVES, 10.0)
        delays.note(BROKEN, Decision(Action.FORM, "all are free", BROKEN), 10.1)
        delays.note(BROKEN, SAVES, 20.0)
        for after_s in (0.1, WORTH_SAYING_S, 2 * WORTH_SAYING_S):
            delays.note(BROKEN.model_copy(update={"state": RoundState.ACTIVE}), SAVES, 10.0 + after_s)
            assert said == []
        for after_s in (0.0, WORTH_SAYING_S, 2 * WORTH_SAYING_S):
            delays.note(BROKEN, SAVES, 30.0 + after_s)
    assert [(line["event"], line["after"], line["reason"]) for line in said] == [("round.delayed", 4, SAVES.reason)]
