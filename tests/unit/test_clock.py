"""Deadlines and bounded waits."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import Deadline, pause
from tests.support.memory_store import ManualClock


def test_a_deadline_runs_out_on_its_own_clock() -> None:
    """Time left shrinks with the clock and never becomes negative."""
    clock = ManualClock()
    deadline = Deadline.after(10.0, clock)
    assert deadline.remaining_s() == pytest.approx(10.0)
    expired = []
    for seconds in (9.0, 2.0):
        clock.advance(seconds)
        expired.append(deadline.expired)
    assert expired == [False, True]
    assert deadline.remaining_s() == 0.0


def test_a_deadline_can_only_be_shortened() -> None:
    """A callee may take less time, never more, and not by starting again."""
    clock = ManualClock()
    deadline = Deadline.after(10.0, clock)
    assert deadline.at_most(3.0).remaining_s() == pytest.approx(3.0)
    assert deadline.at_most(30.0).remaining_s() == pytest.approx(10.0)
    clock.advance(8.0)
    assert deadline.at_most(3.0).remaining_s() == pytest.approx(2.0)
    assert deadline.at_most(3.0).clock is clock


def test_a_pause_ends_by_its_event() -> None:
    """It says whether it was interrupted; negative times do not wait."""
    stop = threading.Event()
    assert not pause(0.0, stop)
    assert not pause(-5.0)
    stop.set()
    assert pause(3600.0, stop)  # longer than the test may take
