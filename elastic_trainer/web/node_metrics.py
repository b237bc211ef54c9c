"""One node's metrics for Prometheus: its ranks, from their pages at the time of the scrape, and its store.

Ranks that have ended are missing from the next scrape on, since only the pages hold values.

*Runs in* the answering threads of the agent (of a worker that has no agent). *Owns* nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from elastic_trainer.ipc.page import Reading
from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import Family
from elastic_trainer.telemetry.rank import GAUGES


class StoreFigures(Protocol):
    """Figures about the connection to the store."""

    @property
    def errors(self) -> int: ...

    @property
    def last_success_wall(self) -> float: ...


class NodeCollector(Collector):
    """All families of Source.NODE. ``store`` None: a process without one."""

    def __init__(
        self,
        run: str,
        node: str,
        look: Callable[[], list[Reading]],
        nonfinite: Callable[[Reading], int],
        counters: Callable[[], dict[str, float]],
        store: StoreFigures | None,
    ) -> None:
        self._run, self._node, self._look, self._nonfinite = run, node, look, nonfinite
        self._counters, self._store = counters, store

    def collect(self) -> Iterator[Metric]:
        placed = sorted((each for each in self._look() if each.pulse.rank >= 0), key=lambda each: each.pulse.round)
        newest = {each.pulse.rank: each for each in placed}  # another may still have the rank of the last round
        ranks = [(each, (self._run, str(rank))) for rank, each in sorted(newest.items())]
        yield _info(ranks)
        for gauge in GAUGES:
            yield _metric(gauge.metric, [(who, getattr(each.pulse, gauge.name)) for each, who in ranks])
        yield _metric(families.LAST_STEP, ((who, since(each)) for each, who in ranks))
        phases = families.PHASES
        yield _metric(
            families.PHASE,
            (((*who, phase), float(phase == each.phase)) for each, who in ranks for phase in phases),
        )
        yield _metric(families.NONFINITE, ((who, self._nonfinite(each)) for each, who in ranks))
        yield _metric(
            families.GPU_MEMORY,
            (
                ((*who, kind), value)
                for each, who in ranks
                if str(each.notes.get("device", "")).startswith("cuda")
                for kind, value in (("allocated", each.pulse.allocated), ("reserved", each.pulse.reserved))
            ),
        )
        here = (self._run, self._node)
        if self._store is not None:
            yield _metric(families.STORE_ERRORS, [(here, self._store.errors)])
            yield _metric(families.STORE_SUCCESS, [(here, self._store.last_success_wall)])
            yield _metric(families.WORKERS_KILLED, [(here, self._counters().get("workers_killed", 0.0))])


def since(reading: Reading) -> float:
    """When this rank committed its last step; before the first, when its process started."""
    return reading.pulse.stepped_wall or float(reading.notes.get("started_wall", 0.0))


def _info(ranks: Iterable[tuple[Reading, tuple[str, str]]]) -> Metric:
    family = families.RANK_INFO
    metric = Metric(f"{families.PREFIX}{family.name}", family.text, "info")
    for each, who in ranks:
        known = {name: str(each.notes.get(name, "")) for name in family.labels[2:]}
        metric.add_sample(family.full_name, {**dict(zip(families.RANK, who, strict=True)), **known}, 1.0)
    return metric


def _metric(family: Family, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    metric = Metric(f"{families.PREFIX}{family.name}", family.text, str(family.kind))
    for values, value in samples:
        metric.add_sample(family.full_name, dict(zip(family.labels, values, strict=True)), float(value))
    return metric
