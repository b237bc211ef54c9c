"""The curves of a run, in at most a thousand points however long it takes.

When they are full, every second point is dropped, and from then on points are taken half as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LIMIT = 1000
FIRST_EVERY_S = 1.0


class Point(NamedTuple):
    """The figures at one moment. ``wall`` is the monitor's Unix time."""

    wall: float
    step: int | None
    loss: float | None
    step_s: float | None
    world_size: int | None


@dataclass(frozen=True, slots=True)
class Curves:
    """The points by column, oldest first."""

    wall: list[float]
    step: list[int | None]
    loss: list[float | None]
    step_s: list[float | None]
    world_size: list[int | None]


class Recorder:
    """Collects the points of one run."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._every_s = FIRST_EVERY_S
        self._points: list[Point] = []

    def note(self, point: Point) -> None:
        """Take ``point`` if one is due, or if the ranks have changed, which could be missed between two points."""
        last = self._points[-1] if self._points else None
        changed = last is not None and last.world_size != point.world_size
        if last is not None and not changed and 0 <= point.wall - last.wall < self._every_s:
            return
        self._points.append(point)
        while len(self._points) > self._limit:
            self._every_s *= 2
            self._points = [*self._points[:-1:2], self._points[-1]]

    def curves(self) -> Curves:
        """The collected points."""
        columns = [list(column) for column in zip(*self._points, strict=True)] or [[] for _ in Point._fields]
        return Curves(*columns)
