"""What happens between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.errors import NonFiniteError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.steps.boundary import Duties, StepBoundaries
from elastic_trainer.worker.steps.one_round import OneRound


def boundaries(tracker: HeartbeatReporter, *, finite: bool, fatal: bool) -> StepBoundaries:
    """Those of a rank whose losses are finite, or not."""
    steps: Any = SimpleNamespace(nonfinite=lambda: not finite, position=SimpleNamespace(step=7))
    none: Any = None
    return StepBoundaries(Control(), none, Duties(none, steps, none, none, tracker, fatal, OneRound(lambda: None)))


def test_a_state_that_is_not_finite_goes_into_no_other_round() -> None:
    """Also where the round ended before the ranks had agreed on that; it is counted. With 'warn' it goes on."""
    tracker = HeartbeatReporter()
    with pytest.raises(NonFiniteError, match="by step 7"):
        boundaries(tracker, finite=False, fatal=True).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
    boundaries(tracker, finite=True, fatal=True).refuse_nonfinite()
    boundaries(tracker, finite=False, fatal=False).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
