"""What all ranks decide at the same boundary: stop, save now, a non-finite loss.

A boundary is a point that every rank passes equally often: the end of a step, a turn of an evaluation. An asynchronous
sum is started at one boundary and read at the next, so the result is there before it is needed and all ranks act at the
same boundary (a test for its arrival could differ between ranks). It starts about four times a second, every k-th
boundary with k agreed in the sum itself, since each costs up to a millisecond.

*Runs in* the worker's main thread. *Fails by* RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.worker.comm.control import Control, Pending, Purpose

EVERY_S = 0.25
LONGEST_INTERVAL = 50
_SMOOTHING = 0.3
_MOST_AT_ONCE = 3.0
"""A single span counts for at most this multiple of the average."""
_COPY = 2.0**-20
"""What a wish for a copy adds to the wishes for a save: fewer ranks than its reciprocal add up to less than one."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The wishes of one rank, or of all together."""

    stop: bool = False
    save: bool = False
    nonfinite: bool = False
    switch: bool = False
    """A planned change is known here; together: known to all ranks."""
    copy: bool = False
    """Shards are to be copied into memory that outlives the workers."""
    mark: int = 0
    """Must be equal on all ranks."""
    differ: bool = False
    """Together: whether the marks differ."""


def interval(boundary_s: float) -> int:
    """Boundaries between two sums when one boundary follows another after ``boundary_s`` seconds."""
    if boundary_s <= 0.0:
        return 1  # nothing is known yet
    return max(1, int(EVERY_S / max(boundary_s, EVERY_S / LONGEST_INTERVAL)))


class Consensus:
    """Counts boundaries and keeps the pending sum. ``at_once``: boundaries are rare, and ranks agree at each."""

    def __init__(self, control: Control, clock: Clock = SYSTEM, *, at_once: bool = False) -> None:
        self._control, self._clock, self._at_once = control, clock, at_once
        self._count = 0
        self._next_start = 1
        self._pending: Pending | None = None
        self._mark = 0
        self._outdated = False
        self._last: float | None = None
        self.boundary_s = 0.0
        """This rank's smoothed seconds from boundary to boundary."""

    def boundary(self, observe: Callable[[], Flags], *, urgent: bool = False) -> Flags | None:
        """Pass a boundary; what all ranks agreed on here, or None if nothing was due.

        ``observe`` is called for this rank's wishes only when a sum starts. ``urgent`` makes a process that is alone
        act at once; several ranks can act only when all know.
        """
        self._measure()
        self._count += 1
        if self._control.alone:
            return self._alone(observe, urgent or self._at_once)
        agreed = self._finish() if self._pending is not None else None
        leaving = agreed is not None and (agreed.stop or agreed.switch)
        if (self._at_once or self._count >= self._next_start) and not leaving:
            wishes = observe()
            self._mark = wishes.mark
            saves = wishes.save + wishes.copy * _COPY
            values = [wishes.stop, saves, wishes.nonfinite, self.boundary_s, wishes.switch, wishes.mark]
            self._pending = self._control.start(Purpose.BOUNDARY, values)
            return self._finish() if self._at_once else agreed
        return agreed

    def reset(self) -> None:
        """A new kind of boundary begins on all ranks: measure afresh, and agree at the next one."""
        self._last, self.boundary_s = None, 0.0
        self._outdated = self._pending is not None
        self._next_start = self._count + 1

    def drain(self) -> Flags | None:
        """Wait for the pending sum, if any; all ranks are at the same boundary, so all or none have one."""
        return self._finish() if self._pending is not None else None

    def _alone(self, observe: Callable[[], Flags], urgent: bool) -> Flags | None:
        if self._count < self._next_start and not urgent:
            return None
        self._next_start = self._count + interval(self.boundary_s)
        return observe()

    def _finish(self) -> Flags:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no sum is under way")
        stop, saves, nonfinite, seconds, switch, marks = pending.wait()
        world = self._control.world_size
        if not self._outdated:
            self._next_start = self._count - 1 + interval(seconds / world)
        self._outdated = False
        flags = Flags(stop > 0, saves >= 1, nonfinite > 0, switch == world, saves % 1.0 > 0)
        return replace(flags, differ=marks != world * self._mark)

    def _measure(self) -> None:
        now = self._clock.monotonic()
        if self._last is not None:
            self.boundary_s = smoothed(self.boundary_s, now - self._last)
        self._last = now


def smoothed(average_s: float, span_s: float) -> float:
    """The average after one more span. A long pause (a checkpoint) moves it little, a lasting change soon."""
    if not average_s:
        return span_s
    return average_s + _SMOOTHING * (min(span_s, _MOST_AT_ONCE * average_s) - average_s)
