"""What stays when the ranks change: the phase that the script is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.model import Phase
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.groups import Group
from elastic_trainer.worker.comm.round_place import RoundPlace
from elastic_trainer.worker.inplace.recovery import InPlaceRecovery
from elastic_trainer.worker.inplace.rounds import Formed
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
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
    formed = Formed(Group(RoundPlace(1, 0, 1, 0, 1), Control()), 0.0)

    def enter(*_: object) -> Formed:
        seen.append(tracker.pulse.phase)
        return formed

    monkeypatch.setattr(InPlaceRecovery, "_settle", lambda recovery, group: tracker.change(Phase.HEALING))
    rounds: Any = SimpleNamespace(enter=enter)
    tracker.change(before)
    InPlaceRecovery(rounds, training).begin()
    assert (seen, tracker.pulse.phase) == ([Phase.RENDEZVOUS], after)
