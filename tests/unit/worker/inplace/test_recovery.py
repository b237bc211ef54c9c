"""What stays when the ranks change: the phase that the script is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.model import Phase
from elastic_trainer.worker.inplace.recovery import Recovery
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.steps.rank_context import RankContext
from elastic_trainer.worker.steps.signals import Signals


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Phase.EVALUATION, Phase.EVALUATION),
        (Phase.CHECKPOINT, Phase.CHECKPOINT),
        (Phase.STARTING, Phase.TRAINING),
        (Phase.TRAINING, Phase.TRAINING),
    ],
)
def test_a_phase_of_the_script_goes_on_in_the_next_round(before: Phase, after: Phase) -> None:
    """A collective in the middle of it met the end of the round; the rest takes long for the same good reason."""
    tracker, seen = HeartbeatReporter(), list[Phase]()
    part: Any = SimpleNamespace(tracker=tracker, feed=SimpleNamespace(), placement=None, span_s=0.0)
    rounds: Any = SimpleNamespace(enter=lambda *_, **__: seen.append(tracker.pulse.phase))
    tracker.change(before)
    Recovery(cast("Rounds", rounds), cast("RankContext", part), cast("Signals", None)).enter()
    assert (seen, tracker.pulse.phase) == ([Phase.RENDEZVOUS], after)
