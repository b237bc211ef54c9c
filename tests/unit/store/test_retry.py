"""The retry policy on virtual time."""

from __future__ import annotations

import threading

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import LeaseLostError, OutcomeUnknownError, StoreUnavailableError
from elastic_trainer.store.retry import (
    LEAST_ATTEMPT_S,
    LEAST_TRY_S,
    LONGEST_PAUSE_S,
    RetryBackoff,
    read_attempt,
    within,
)
from tests.support.memory_store import ManualClock


class JumpingClock(ManualClock):
    """A wait passes at once, and takes its time on this clock only."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()


def test_an_unavailable_store_is_asked_again_until_it_answers() -> None:
    """Two failures and an answer are an answer."""
    tries = iter(range(1, 4))

    def attempt() -> int:
        number = next(tries)
        if number < 3:
            raise StoreUnavailableError(f"try {number}")
        return number

    assert within(Deadline.after(60.0, JumpingClock()), attempt) == 3


def test_the_last_error_comes_out_by_the_deadline() -> None:
    """Retrying ends before the deadline, not after it, and took most of it."""
    clock = JumpingClock()
    deadline = Deadline.after(10.0, clock)
    began, tries = clock.monotonic(), 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        left.append(deadline.remaining_s())
        raise StoreUnavailableError(str(tries))

    left: list[float] = []
    with pytest.raises(StoreUnavailableError) as caught:
        within(deadline, attempt)
    assert min(left) > LEAST_TRY_S
    assert caught.value.message == str(tries)
    assert tries > 10
    assert 10.0 - LONGEST_PAUSE_S - LEAST_TRY_S <= clock.monotonic() - began <= 10.0


@pytest.mark.parametrize("error", [OutcomeUnknownError("written?"), LeaseLostError("gone"), KeyError("bug")])
def test_other_errors_are_never_retried(error: Exception) -> None:
    """A write with an unknown outcome above all."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(type(error)):
        within(Deadline.after(60.0, JumpingClock()), attempt)
    assert tries == 1


def test_stop_ends_the_retrying() -> None:
    """A store that is being closed does not hold its callers until their deadlines."""
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoreUnavailableError):
        within(Deadline.after(1e6), _unavailable, stop)


def _unavailable() -> None:
    raise StoreUnavailableError("down")


def test_one_attempt_leaves_time_for_another() -> None:
    """A frozen server may use half of the time, but a short deadline is used whole."""
    clock = ManualClock()
    assert read_attempt(Deadline.after(20.0, clock)).remaining_s() == pytest.approx(10.0)
    assert read_attempt(Deadline.after(0.5, clock)).remaining_s() == pytest.approx(0.5)
    assert read_attempt(Deadline.after(1.5, clock)).remaining_s() == pytest.approx(LEAST_ATTEMPT_S)


def test_backoff_begins_short_and_grows_to_its_limit() -> None:
    """Pauses are jittered within half and all of a step that doubles; success begins again."""
    backoff = RetryBackoff(first_s=0.1, longest_s=0.5)
    steps = [0.1, 0.2, 0.4, 0.5, 0.5]
    for step in steps:
        assert step / 2 <= backoff.next_s() <= step
    for _ in range(5000):
        assert backoff.next_s() <= 0.5
    backoff.reset()
    assert backoff.next_s() <= 0.1
