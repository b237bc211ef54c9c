"""The gauges of a rank, each declared once.

A field of :class:`RankGauges` appears in the heartbeat page (``ipc/page.py``), in its node's health document
(``membership/documents.py``), in ``/api/runs/<run>``, in the metrics of the node's endpoint, and in the tables of
``elastic-trainer status`` and the status page. To add one, declare it here and set it in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import median
from typing import Any, Final

from elastic_trainer.telemetry.family import RANK, Family, MetricKind, MetricSource


class Unit(StrEnum):
    """The unit in which a number is displayed."""

    COUNT = "count"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Gauge:
    """Name, display and export of one field of a rank."""

    name: str
    title: str
    unit: Unit
    metric: Family
    wide: bool
    """Whether narrow screens omit its column."""
    of_node: Callable[[Iterable[float]], float]
    """Aggregates the values of all ranks of a node."""
    zero: bool
    """Whether 0 is a value; otherwise 0 means unknown."""

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
    """The gauges of a rank; its worker updates them in place."""

    rank: int = -1
    """-1 before it has joined a round."""
    step: int = field(
        default=0, metadata=_shown("step", "The last step that this rank committed.", "Step", of_node=min, zero=True)
    )
    """The last committed step of the job: that of the state which this rank holds."""
    step_s: float = field(
        default=0.0,
        metadata=_shown(
            "step_duration_seconds", "Duration of a step, smoothed.", "Step time", Unit.SECONDS, wide=False
        ),
    )
    compute_s: float = field(
        default=0.0,
        metadata=_shown(
            "compute_duration_seconds",
            "Duration of a step without the wait for other ranks, smoothed: shows a slow rank.",
            "Computing",
            Unit.SECONDS,
        ),
    )
    threads: int = field(default=0, metadata=_shown("threads", "Threads of this rank's process.", "Threads"))


GAUGES: Final = tuple(Gauge(each.name, **each.metadata) for each in fields(RankGauges) if each.metadata)
"""In the order of their columns."""
