"""The declaration of a metric: its name, kind, labels and exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

PREFIX: Final = "elastic_trainer_"


class MetricKind(StrEnum):
    """The Prometheus type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class MetricSource(StrEnum):
    """The exporter of a metric."""

    NODE = "node"
    """The agent of each node (the worker itself, if it has no agent)."""
    MONITOR = "monitor"
    """``elastic-trainer monitor``, from the store."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` is without the prefix and, for counters, without ``_total`` (for info without ``_info``)."""

    name: str
    kind: MetricKind
    source: MetricSource
    text: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All values of those labels that have a closed set."""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in queries (for a histogram without ``_bucket``, ``_sum``, ``_count``)."""
        suffix = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}.get(self.kind, "")
        return f"{PREFIX}{self.name}{suffix}"


RANK: Final = ("run", "rank")
RUN: Final = ("run",)
NODE: Final = ("run", "node")
