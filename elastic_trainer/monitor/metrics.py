"""The metrics of all runs for Prometheus: all families of MetricSource.MONITOR, built for each scrape.

Counters are sums over all nodes that ever published any, so that they do not decrease when a node leaves. All values of
an enumerated label exist. A run that has been over for an hour disappears, so that series do not accumulate. Unknown
values (a loss, a checkpoint) have no series until they are known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, product
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from elastic_trainer.monitor import state
from elastic_trainer.monitor.reading import FORGET_S, RunReading, StoreReading
from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import FAMILIES, Family, MetricKind, MetricSource

Labels = tuple[str, ...]
"""Values of the labels other than the run's name."""

COUNTED: Final = {
    families.RESTARTS.name: "ended.{}",
    families.TIME.name: "seconds.{}",
    families.SAMPLES.name: "samples",
    families.NONFINITE_LOSSES.name: "nonfinite_steps",
    families.DIFFERENCES.name: "differences",
    families.AUDIT_MISMATCHES.name: "audit_mismatches",
    families.VERDICTS.name: "verdict.{}.{}",
    families.CHECKPOINTS.name: "{}.{}",
    families.CHECKPOINT_DURATION.name: "{}_s",
    families.RECOVERY.name: "recovery_s.{}",
}
"""The nodes' counters (see membership/health) behind each counter or histogram."""


class MonitorCollector(Collector):
    """Collects the metrics of all runs of ``reading()``."""

    def __init__(self, reading: Callable[[], StoreReading], *, forget_s: float = FORGET_S) -> None:
        self._reading, self._forget_s = reading, forget_s

    def collect(self) -> Iterator[Metric]:
        reading = self._reading()
        runs = [(name, run) for name, run in sorted(reading.runs.items()) if not run.forgotten(self._forget_s)]
        told = [(name, gauges(run), run.documents.counters) for name, run in runs]
        for family in FAMILIES:
            if family.source is MetricSource.MONITOR:
                metric = Metric(f"{families.PREFIX}{family.name}", family.text, str(family.kind))
                if family is families.MONITOR_STORE:
                    metric.add_sample(family.full_name, {}, reading.read_wall or 0.0)
                for name, present, counters in told:
                    _add(metric, family, {"run": name}, present, counters)
                yield metric


def label_values(family: Family) -> list[Labels]:
    """All combinations of the values of its labels other than the run."""
    return list(product(*family.values.values()))


def gauges(run: RunReading) -> dict[str, dict[Labels, float]]:
    """The known values of all gauges, by family and label values."""
    documents, seen = run.documents, run.seen
    states = Counter(str(node.record.state) for node in documents.living_nodes.values())
    told: dict[str, dict[Labels, float]] = {
        families.WORLD_SIZE.name: {(): state.world_size(documents)},
        families.NODES.name: {(each,): states[each] for each in families.NODE_STATES},
        families.ROUND.name: {(): documents.round.number if documents.round is not None else 0},
        families.RUN_STATE.name: {(each,): each == seen.state for each in families.RUN_STATES},
        families.RENDEZVOUS_START.name: {(): seen.gathering_since_wall},
        families.CHECKPOINT_INTERVAL.name: {(): state.save_interval_s(documents)},
        families.NODES_LOST.name: {(): len(state.lost_nodes(documents))},
        families.NODES_SPARE.name: {(): len(state.spares(documents))},
        families.SHARD_GROUPS.name: {(): state.shard_groups(documents)},
        families.STRAGGLERS.name: {(): len(state.straggling(documents).ranks)},
    }
    if documents.closed and (ended := state.ended_by(documents)) is not None:
        told[families.RUN_ENDED.name] = {(seen.state,): ended.wall}
    if (spec := documents.spec) is not None:
        told[families.NODES_LIMIT.name] = {("min",): spec.min_nodes, ("max",): spec.max_nodes}
    if (saved := documents.saved) is not None:
        told[families.CHECKPOINT_SUCCESS.name] = {(): saved.wall}
        told[families.CHECKPOINT_BYTES.name] = {(): saved.bytes}
        if saved.free_bytes is not None:
            told[families.CHECKPOINT_FREE.name] = {(): saved.free_bytes}
    if (loss := state.current_loss(documents)) is not None:
        told[families.LOSS.name] = {(): loss}
    if (step := state.current_step(documents)) is not None:
        told[families.PROGRESS.name] = {(): step}
    return told


def _add(
    metric: Metric,
    family: Family,
    run: dict[str, str],
    present: Mapping[str, Mapping[Labels, float]],
    counters: Mapping[str, float],
) -> None:
    for values in label_values(family):
        labels = run | dict(zip(family.values, values, strict=True))
        if family.kind is MetricKind.GAUGE:
            known = present.get(family.name, {})
            if values in known:
                metric.add_sample(family.full_name, labels, float(known[values]))
            continue
        counter = COUNTED[family.name].format(*values)
        if family.kind is MetricKind.HISTOGRAM:
            upto, total = histogram(counters, counter, family.buckets)
            for bound, count in zip([*map(floatToGoString, family.buckets), "+Inf"], upto, strict=True):
                metric.add_sample(f"{family.full_name}_bucket", labels | {"le": bound}, count)
            metric.add_sample(f"{family.full_name}_count", labels, upto[-1])
            metric.add_sample(f"{family.full_name}_sum", labels, total)
        else:
            metric.add_sample(family.full_name, labels, counters.get(counter, 0.0))


def histogram(counters: Mapping[str, float], name: str, bounds: tuple[float, ...]) -> tuple[list[float], float]:
    """Cumulative counts for each of ``bounds`` and in total, and the sum, from the counters of histogram ``name``.

    A count of an unknown bound is added to the next higher one: another version may have other bounds.
    """
    counts = [0.0] * (len(bounds) + 1)
    start = f"{name}.le."
    for counter, value in counters.items():
        with suppress(ValueError):  # a bound that is no number
            if counter.startswith(start):
                counts[bisect_left(bounds, float(counter.removeprefix(start)))] += value
    counts[-1] += max(0.0, counters.get(f"{name}.count", 0.0) - sum(counts))
    return list(accumulate(counts)), counters.get(f"{name}.sum", 0.0)
