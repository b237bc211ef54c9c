"""The one door to time: monotonic now, wall clock, deadlines, bounded waits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """What code that needs time takes as an argument, so that tests can drive it."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people to read; never compared between nodes."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until ``event`` is set or ``timeout_s`` seconds passed; True when it is set."""
        ...


class SystemClock:
    """The real clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(max(0.0, timeout_s))


SYSTEM = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock that travels through a whole operation.

    Callees may shrink it (:meth:`at_most`), never restart it.
    """

    expires_at: float
    clock: Clock = SYSTEM

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM) -> Deadline:
        """The deadline ``seconds`` from now."""
        return cls(clock.monotonic() + seconds, clock)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.expires_at - self.clock.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s() <= 0.0

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now."""
        return Deadline(min(self.expires_at, self.clock.monotonic() + seconds), self.clock)


def pause(seconds: float, stop: threading.Event | None = None, clock: Clock = SYSTEM) -> bool:
    """Wait ``seconds`` or until ``stop`` is set; True when it was."""
    return clock.wait(stop if stop is not None else threading.Event(), seconds)
