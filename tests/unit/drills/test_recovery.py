"""The cost of a fault, from the ledger."""

from __future__ import annotations

import pytest

from elastic_trainer.drills.faults import FaultKind
from elastic_trainer.drills.measure import recovery
from tests.support.story import committed, opened, struck


def test_recovery_is_the_first_step_of_a_later_round() -> None:
    """Steps that the old round still commits after the fault are no recovery, but they shorten the pause."""
    lines = [committed(step, 1, float(step)) for step in range(1, 6)]
    lines += [committed(6, 1, 5.3), committed(4, 2, 9.0, world=3), committed(5, 2, 9.5)]
    found = recovery(struck(t=5.2), lines)
    assert found is not None
    assert found.recovery_s == pytest.approx(3.8)
    assert found.pause_s == pytest.approx(3.7)
    assert (found.round, found.step, found.steps_repeated, found.world) == (2, 4, 3, 3)


def test_nothing_is_repeated_when_the_next_round_continues() -> None:
    """The in-place case."""
    found = recovery(struck(t=1.5), [committed(1, 1, 1.0), committed(2, 2, 1.6)])
    assert found is not None
    assert found.steps_repeated == 0


def test_only_what_was_standing_counts_as_repeated() -> None:
    """Steps of round 1 that round 2 had thrown away already are not charged to the fault in round 2."""
    lines = [committed(step, 1, float(step)) for step in range(1, 11)]
    lines += [committed(6, 2, 20.0), committed(7, 2, 21.0), committed(6, 3, 30.0)]
    found = recovery(struck(t=21.5), lines)
    assert found is not None
    assert found.steps_repeated == 2


def test_there_is_no_recovery_before_a_later_round_has_committed() -> None:
    """A round that was formed and committed nothing is none."""
    assert recovery(struck(t=1.5), [committed(1, 1, 1.0), opened(2, 3.0)]) is None
    assert recovery(struck(t=1.5), []) is None


def test_a_join_is_answered_by_the_first_round_that_has_the_newcomer() -> None:
    """Another failure in between makes a later round, but not with the new node."""
    joined = struck(FaultKind.JOIN, node="n2", t=1.5)
    lines = [committed(1, 1, 1.0), committed(2, 2, 2.0)]
    assert recovery(joined, lines) is None
    lines += [committed(3, 3, 4.0), opened(3, 3.9, step=2, node="n2", rank=1), committed(3, 3, 4.1, node="n2", rank=1)]
    found = recovery(joined, lines)
    assert found is not None
    assert found.round == 3
    assert found.recovery_s == pytest.approx(2.5)
    assert found.pause_s == pytest.approx(2.0)
