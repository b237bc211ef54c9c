"""What stays when the ranks change: the phase that the script is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.model import Phase
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.groups import Group, RankAssignment
from elastic_trainer.worker.recovery import Formed, InPlaceRecovery
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.steps.options import CheckOptions


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Phase.EVALUATION, Phase.EVALUATION),
        (Phase.CHECKPOINT, Phase.CHECKPOINT),
        (Phase.STARTING, Phase.TRAINING),
        (Phase.TRAINING, Phase.TRAINING),
    ],
)
def test_a_phase_of_the_script_goes_on_in_the_next_round(
    before: Phase, after: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in the middle of it met the end of the round; the rest takes long for the same good reason."""
    tracker, seen = HeartbeatReporter(), list[Phase]()
    options = SimpleNamespace(checks=CheckOptions())
    training: Any = SimpleNamespace(place=SimpleNamespace(tracker=tracker, span_s=0.0, options=options))
    formed = Formed(Group(RankAssignment(1, 0, 1, 0, 1), Control()), 0.0)

    def enter(*_: object) -> Formed:
        seen.append(tracker.pulse.phase)
        return formed

    monkeypatch.setattr(InPlaceRecovery, "_settle", lambda recovery, group: tracker.change(Phase.HEALING))
    rounds: Any = SimpleNamespace(enter=enter)
    tracker.change(before)
    InPlaceRecovery(rounds, training).begin()
    assert (seen, tracker.pulse.phase) == ([Phase.RENDEZVOUS], after)


@pytest.mark.parametrize("went_on", [{}, {"step": 9, "lineage": 3}, {"count": 4}])
def test_what_a_script_does_behind_a_step_is_left_out_where_the_others_went_on(
    went_on: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have done it, in a round without this rank: alone it would make their calls with nobody."""
    due: list[int] = []
    position = SimpleNamespace(step=7, lineage=1)
    present = SimpleNamespace(boundaries=SimpleNamespace(save_due=due.append))
    options = SimpleNamespace(checks=CheckOptions())
    place = SimpleNamespace(position=position, present=present, options=options, record=lambda step: None)
    training: Any = SimpleNamespace(
        place=place, apart=False, steps=SimpleNamespace(dirty=False), parted_by=lambda error: None
    )
    rounds: Any = SimpleNamespace(confirms=lambda error: True)
    recovery = InPlaceRecovery(rounds, training)
    recovery._calls.count = 3

    def regroup(recovery: InPlaceRecovery, *, joinable: bool) -> None:
        assert not joinable
        position.step, position.lineage = went_on.get("step", 7), went_on.get("lineage", 1)
        recovery._calls.count = went_on.get("count", 3)

    monkeypatch.setattr(InPlaceRecovery, "_regroup", regroup)
    step: Any = SimpleNamespace(number=7, committed=True)
    assert recovery.absorb(step, RoundBrokenError("a peer was lost"))
    assert step.committed is not bool(went_on)
    assert due == ([] if went_on else [7])
