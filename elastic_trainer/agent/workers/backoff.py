"""Exponential back-off of a node whose workers keep failing, before it joins again. Pure.

Each join is a planned change for all nodes. A node whose workers make no progress doubles its wait each time.
"""

from __future__ import annotations

from dataclasses import dataclass

ENOUGH_STEPS = 10
LONGEST_S = 60.0
DOUBLINGS = 6
"""More lives would exceed :data:`LONGEST_S`."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Consecutive lives that ended before they had committed :data:`ENOUGH_STEPS` steps."""

    count: int = 0

    def after(self, steps: int) -> Backoff:
        """The back-off after a life of ``steps`` committed steps."""
        return Backoff(0 if steps >= ENOUGH_STEPS else self.count + 1)

    def back_off_s(self) -> float:
        """Seconds to wait before joining: 0 after the first such life, then 1, 2, 4, ... up to a minute."""
        doublings = min(self.count - 2, DOUBLINGS)
        return 0.0 if doublings < 0 else min(LONGEST_S, 2.0**doublings)
