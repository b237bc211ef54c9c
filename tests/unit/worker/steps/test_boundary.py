"""What happens between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.errors import NonFiniteError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.saver import Cadence, Saver
from elastic_trainer.worker.steps.boundary import Boundaries


def boundaries(tracker: HeartbeatReporter, *, finite: bool, fatal: bool) -> Boundaries:
    """Those of a rank whose losses are finite, or not."""
    made = Boundaries(Control(), cast("Any", None), Saver(None, Cadence(), lambda _: None), tracker, fatal=fatal)
    steps = SimpleNamespace(nonfinite=lambda: not finite, position=SimpleNamespace(step=7))
    made.watch(cast("Any", steps))
    return made


def test_a_state_that_is_not_finite_goes_into_no_other_round() -> None:
    """Also where the round ended before the ranks had agreed on that; it is counted. With 'warn' it goes on."""
    tracker = HeartbeatReporter()
    with pytest.raises(NonFiniteError, match="by step 7"):
        boundaries(tracker, finite=False, fatal=True).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
    boundaries(tracker, finite=True, fatal=True).refuse_nonfinite()
    boundaries(tracker, finite=False, fatal=False).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
