"""Finds ranks that compute much longer than the others. Pure.

All ranks wait for the slowest at each step, so their step times are equal; only the time without that wait differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from elastic_trainer.wording import counted

RATIO: Final = 1.5
"""A rank is a straggler from this multiple of the median on: the job then takes half as long again."""
LEAST_RANKS: Final = 3
"""With only two ranks one cannot say which is the unusual one."""
LEAST_EXCESS_S: Final = 0.005
"""Minimum excess over the median: the scheduler of a shared machine occasionally takes a few milliseconds from any
process, which is half of a tiny step but negligible in a step of realistic length."""


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The result of comparing all ranks once. ``median_s`` is None if too few ranks are known."""

    ranks: frozenset[int]
    median_s: float | None
    reason: str

    def slowdown(self, compute_s: float) -> float | None:
        """``compute_s`` as a multiple of the median."""
        return compute_s / self.median_s if self.median_s and compute_s > 0 else None


def find_stragglers(compute_s: Mapping[int, float]) -> Stragglers:
    """The ranks whose ``compute_s`` (seconds of a step without the wait for others; 0: unknown) is unusually long."""
    known = {rank: seconds for rank, seconds in compute_s.items() if seconds > 0}
    if len(known) < LEAST_RANKS:
        few = counted(len(known), "rank is", "ranks are")
        return Stragglers(frozenset(), None, f"{few} known, {LEAST_RANKS} are needed")
    middle = median(known.values())
    limit = max(RATIO * middle, middle + LEAST_EXCESS_S)
    slow = frozenset(rank for rank, seconds in known.items() if seconds > limit)
    if not slow:
        return Stragglers(slow, middle, "all ranks compute about equally long")
    worst = max(slow, key=lambda rank: known[rank])
    reason = f"rank {worst} computes {known[worst]:.3g} s a step, the median is {middle:.3g} s"
    return Stragglers(slow, middle, reason + (f" ({len(slow)} ranks are slow)" if len(slow) > 1 else ""))
