"""What the order of writes in the store proves about clocks."""

from __future__ import annotations

import pytest

from elastic_trainer.preflight.finding import FitLimits, Status
from elastic_trainer.preflight.judge import Anchor, Dated, clock_finding, least_offset

FIRST = Anchor(revision=100, before=1000.0, after=1000.1)
LAST = Anchor(revision=200, before=1010.0, after=1010.1)


@pytest.mark.parametrize(
    ("revision", "wall", "offset"),
    [
        (50, 990.0, 0.0),  # written at some time before: it may be right
        (50, 1003.1, 3.0),  # written before we began, but tells a later time: ahead
        (50, -1e6, 0.0),  # may just be old
        (150, 1005.0, 0.0),  # between
        (150, 1000.05, 0.0),
        (150, 1015.1, 5.0),  # tells a time after the end: ahead
        (150, 995.0, -5.0),  # tells a time before the beginning: behind
        (250, 1020.0, 0.0),  # written after the end
        (250, 1004.0, -6.0),  # after the end, but tells an earlier time: behind
    ],
)
def test_the_least_error_that_is_proved(revision: int, wall: float, offset: float) -> None:
    """Nothing is concluded where a right clock could have told the same."""
    assert least_offset(Dated("b", revision, wall), FIRST, LAST) == pytest.approx(offset)


def test_the_worst_clock_is_a_warning() -> None:
    """Never more: nothing in the protocol relies on clocks."""
    documents = [Dated("b", 150, 1005.0), Dated("c", 150, 950.0), Dated("d", 150, 1012.0)]
    found = clock_finding(documents, FIRST, LAST, FitLimits())
    assert found.status is Status.WARN
    assert found.text == "the clock of c is at least 50 s behind this node's"


def test_small_errors_and_no_documents_are_no_warning() -> None:
    """Within the limit it is fine; without other nodes nothing is known."""
    assert clock_finding([Dated("b", 150, 1010.9)], FIRST, LAST, FitLimits()).status is Status.OK
    assert clock_finding([], FIRST, LAST, FitLimits()).status is Status.SKIPPED
