"""Collectives under way: waited for, interrupted, outlived."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.clock import SystemClock
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm.abort import InterruptibleWaits
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.steps.engine import LaterLoss


class Operation:
    """A collective that ends, or fails, on command. ``then`` happens in the third moment of a wait for it."""

    def __init__(self) -> None:
        self.ended = False
        self.error: str | None = None
        self.waits = 0
        self.then: Callable[[], None] = lambda: None

    def end(self, error: str | None = None) -> None:
        self.error, self.ended = error, True

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if self.waits == 3 or timeout is None:
            self.then()
        if not self.ended:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_an_operation_that_has_ended_is_waited_for_once() -> None:
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    operation.end()
    works.wait(works.begun(operation))
    assert operation.waits == 1
    assert works.outlive() == 0


def test_operations_that_nobody_waits_for_are_dropped_once_they_have_ended() -> None:
    works, lasting = InterruptibleWaits(interruptible=True), Operation()
    lasting.then = lasting.end
    works.begun(lasting)
    for _ in range(1000):
        works.begun(unread := Operation())
        unread.end()
    assert 1 <= works.outlive() <= 100
    assert lasting.ended


def test_the_end_of_the_round_interrupts_a_wait() -> None:
    """The operation itself never ends; the wait for it does, in the moment in which the round is over."""
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    operation.then = lambda: works.end("the round is over")
    with pytest.raises(RoundBrokenError):
        works.wait(operation)
    assert operation.waits == 3
    assert not operation.is_completed()


def test_an_operation_abandoned_in_the_middle_is_outlived() -> None:
    """It is held until it has ended, however it ends."""
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    works.end("the round is over")
    with pytest.raises(RoundBrokenError):
        works.wait(operation)
    operation.then = lambda: operation.end("Connection closed by peer")
    assert works.outlive() == 1
    assert operation.is_completed()
    assert works.outlive() == 0


def test_what_an_operation_raises_passes_through() -> None:
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    operation.then = lambda: operation.end("Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed"):
        works.wait(operation)


def test_an_operation_that_fails_after_the_end_of_its_round_fails_because_of_that() -> None:
    """Whatever it says itself: it may have failed in the moment that the wait was busy with."""
    works, operation = InterruptibleWaits(interruptible=True), Operation()
    works.begun(operation)
    works.end("the round is over")
    operation.end("Timed out waiting 500ms for recv operation to complete")
    with pytest.raises(RoundBrokenError, match="the round is over") as caught:
        works.wait(operation)
    assert "500ms" in str(caught.value.__cause__)


class Slow(Operation):
    """One that takes ten minutes of a clock that it moves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.now += 60.0
        if self.now < 600.0:
            raise RuntimeError("Operation timed out!")
        self.end()
        return True


def test_a_loss_is_waited_for_as_long_as_the_round_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may be saving: whether that takes too long is for the agents to say, not for who waits for it."""
    slow = Slow()
    monkeypatch.setattr(SystemClock, "monotonic", lambda _: slow.now)
    group: Any = SimpleNamespace(allreduce=lambda _: slow)
    control = Control(group, 0, 2, InterruptibleWaits(interruptible=True))
    pending = control.start(Purpose.LOSS, [3.0])
    pending._vector *= 2.0  # as if the other rank had the same loss
    steps: Any = SimpleNamespace(control=control, knows_loss=lambda mean: None)
    assert LaterLoss(steps, control, pending, None).read() == 3.0
    assert slow.now == 600.0
