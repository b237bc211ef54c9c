"""The retry policy: retries only calls that certainly had no effect, with jittered pauses, within the deadline.

:class:`StoreUnavailableError` means that nothing happened, so even a write may be retried after it;
:class:`OutcomeUnknownError` is always raised to the caller.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import StoreUnavailableError

ResultT = TypeVar("ResultT")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.5
LEAST_ATTEMPT_S = 1.0
LEAST_TRY_S = 0.1
"""No attempt begins with less time left: its unknown outcome would hide the known one."""


def read_attempt(deadline: Deadline) -> Deadline:
    """The deadline of one read attempt: half of the remaining time, so that a frozen server leaves time for another."""
    return deadline.at_most(max(LEAST_ATTEMPT_S, deadline.remaining_s() / 2))


def within(deadline: Deadline, attempt: Callable[[], ResultT], stop: threading.Event | None = None) -> ResultT:
    """The result of ``attempt()``, retried while the store is unavailable and ``deadline`` allows.

    Raises the last error at the deadline. Setting ``stop`` ends the pauses and the retries.
    """
    ended = stop if stop is not None else threading.Event()

    def gives_up(state: RetryCallState) -> bool:
        # as tenacity's stop_before_delay, but on the deadline's own clock
        return ended.is_set() or state.upcoming_sleep + LEAST_TRY_S >= deadline.remaining_s()

    def sleep(seconds: float) -> None:
        pause(seconds, ended, deadline.clock)

    policy = Retrying(
        retry=retry_if_exception_type(StoreUnavailableError),
        wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
        stop=gives_up,
        sleep=sleep,
        reraise=True,
    )
    return policy(attempt)


@dataclass(slots=True)
class RetryBackoff:
    """The pauses of a loop without a deadline: jittered, doubling from FIRST_PAUSE_S to LONGEST_PAUSE_S."""

    failures: int = 0

    def next_s(self) -> float:
        """The pause after another failure: a random fraction, at least half, of the present step."""
        step = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.failures, 20))
        self.failures += 1
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0
