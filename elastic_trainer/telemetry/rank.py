"""The gauges of a rank, each declared once.

A field of :class:`RankGauges` has its place in the heartbeat page (``ipc/page.py``), in its node's health document
(``membership/health.py``), in ``/api/runs/<run>``, among the metrics of the node's endpoint, and in the tables of
``elastic-trainer status`` and of the status page. To add one, declare it here and set it in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import median
from typing import Any, Final

from elastic_trainer.telemetry.family import RANK, Family, MetricKind, MetricSource


class Unit(StrEnum):
    """How people read a number."""

    COUNT = "count"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Gauge:
    """How one field of a rank is named, written and exported."""

    name: str
    title: str
    unit: Unit
    metric: Family
    wide: bool
    """Whether a phone leaves its column out."""
    of_node: Callable[[Iterable[float]], float]
    """What stands for all ranks of a node."""
    zero: bool
    """Whether 0 is a value; else it means that none is known."""

    def known(self, value: Any) -> Any:
        return value if self.zero else value or None


def _shown(
    metric: str,
    text: str,
    title: str,
    unit: Unit = Unit.COUNT,
    *,
    wide: bool = True,
    of_node: Callable[[Iterable[float]], float] = median,
    zero: bool = False,
) -> dict[str, Any]:
    family = Family(metric, MetricKind.GAUGE, MetricSource.NODE, text, RANK)
    return {"title": title, "unit": unit, "metric": family, "wide": wide, "of_node": of_node, "zero": zero}


@dataclass(slots=True)
class RankGauges:
    """What a rank says of itself; its worker writes it in place."""

    rank: int = -1
    """-1 before it has a place."""
    step: int = field(
        default=0, metadata=_shown("step", "The last step that this rank committed.", "Step", of_node=min, zero=True)
    )
    """The last step committed, job-wide: that of the state which it holds."""
    step_s: float = field(
        default=0.0,
        metadata=_shown(
            "step_duration_seconds", "How long a step takes, smoothed.", "Step time", Unit.SECONDS, wide=False
        ),
    )
    compute_s: float = field(
        default=0.0,
        metadata=_shown(
            "compute_duration_seconds",
            "How long a step takes without the wait for other ranks, smoothed: here a slow rank shows.",
            "Computing",
            Unit.SECONDS,
        ),
    )
    threads: int = field(default=0, metadata=_shown("threads", "Threads of this rank's process.", "Threads"))


GAUGES: Final = tuple(Gauge(each.name, **each.metadata) for each in fields(RankGauges) if each.metadata)
"""In the order of their columns."""
