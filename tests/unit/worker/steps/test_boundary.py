"""What happens between steps."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.clock import SystemClock
from elastic_trainer.errors import NonFiniteError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.recovery import Recovery
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.steps.engine import EveryStep, StepBoundaries
from elastic_trainer.worker.steps.options import CheckOptions
from tests.support.memory_store import ManualClock


def context(
    tracker: HeartbeatReporter, *, nonfinite: str = "raise", plan_check: Any = None, signals: Any = None
) -> Any:
    return SimpleNamespace(
        tracker=tracker,
        signals=signals,
        feed=SimpleNamespace(plan_check=plan_check),
        options=SimpleNamespace(checks=CheckOptions(nonfinite=nonfinite)),
    )


def boundaries(tracker: HeartbeatReporter, *, finite: bool, fatal: bool) -> StepBoundaries:
    """Those of a rank whose losses are finite, or not."""
    steps: Any = SimpleNamespace(
        nonfinite=lambda: not finite, position=SimpleNamespace(step=7), sync=EveryStep(), forgive=lambda: None
    )
    none: Any = None
    where = context(tracker, nonfinite="raise" if fatal else "warn")
    return StepBoundaries(Control(), where, none, steps, none, Recovery(cast("Any", None)))


def test_a_state_that_is_not_finite_goes_into_no_other_round() -> None:
    """Also where the round ended before the ranks had agreed on that; it is counted. With 'warn' it goes on."""
    tracker = HeartbeatReporter()
    with pytest.raises(NonFiniteError, match="by step 7"):
        boundaries(tracker, finite=False, fatal=True).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1
    boundaries(tracker, finite=True, fatal=True).refuse_nonfinite()
    boundaries(tracker, finite=False, fatal=False).refuse_nonfinite()
    assert tracker.pulse.nonfinite == 1


class Both:
    """A sum over this rank and another one, which wishes the same."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = [2.0 * value for value in values]

    def wait(self) -> list[float]:
        return self._values


class Two:
    """Boundaries of rank 0 of two, with steps of a second: a sum begins at each boundary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, due: bool = False) -> None:
        self.clock, self.saves, self.wishes = ManualClock(), list[int](), list[bool]()
        monkeypatch.setattr(SystemClock, "monotonic", lambda _: self.clock.monotonic())
        control: Any = SimpleNamespace(rank=0, world_size=2, alone=False, start=self._start)
        self.signals = cast("Any", SimpleNamespace(requested=None, save_requested=False))
        self.position = SimpleNamespace(step=0)
        self.due = due
        steps: Any = SimpleNamespace(nonfinite=lambda: False, position=self.position, sync=EveryStep())
        saver: Any = SimpleNamespace(
            look=lambda: None,
            refused=lambda: False,
            copy_if_due=lambda: None,
            prepare=lambda: None,
            due_by_step=lambda step: False,
            due_by_time=lambda: self.due,
            due_on_demand=lambda: False,
            possible=True,
            attempt=self._attempt,
            wants_copy=lambda: False,
        )
        quiet: Any = SimpleNamespace(mark=lambda: 0, after_step=lambda step: None)
        where = context(HeartbeatReporter(), plan_check=quiet, signals=self.signals)
        self.boundaries = StepBoundaries(control, where, saver, steps, quiet, Recovery(cast("Any", None)))

    def _start(self, purpose: object, values: list[float]) -> Both:
        self.wishes.append(bool(values[1]))
        return Both(values)

    def _attempt(self) -> None:
        self.saves.append(self.position.step)
        self.due = False

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(1.0)
            self.position.step += 1
            self.boundaries.after_step(self.position.step)


def test_a_signal_saves_once_at_a_later_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the next sum has begun by then; one that comes afterwards saves again."""
    two = Two(monkeypatch)
    two.steps(3)
    two.signals.save_requested = True
    two.steps(4)
    assert two.saves == [5]
    assert two.wishes.count(True) == 2
    two.signals.save_requested = True
    two.steps(3)
    assert two.saves == [5, 9]


def test_a_save_by_time_is_made_once_though_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that begins at the boundary of the save was asked before it."""
    two = Two(monkeypatch, due=True)
    two.steps(6)
    assert two.saves == [2]
