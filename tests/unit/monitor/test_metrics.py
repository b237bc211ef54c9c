"""The metrics of all runs: which series there are, and their values."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.documents import GONE, RoundState, Saved
from elastic_trainer.monitor.metrics import COUNTED, MonitorCollector, histogram, label_values
from elastic_trainer.monitor.reading import RunReading, StoreReading
from elastic_trainer.monitor.state import Observer, RunDocuments
from elastic_trainer.telemetry.families import FAMILIES, PREFIX, MetricKind, MetricSource
from tests.support.monitored import entry, grouped, health, rank, run

MINE = [family for family in FAMILIES if family.source is MetricSource.MONITOR]


def reading(*runs: RunDocuments, now: float = 100.0) -> StoreReading:
    seen = {each.run: RunReading(each, Observer().observe(each, now, 5000.0)) for each in runs}
    return StoreReading(seen, read_at=now, read_wall=4999.0)


def series(*runs: RunDocuments) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(MonitorCollector(lambda: reading(*runs))).decode()
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[name, frozenset(({"run": "r"} | labels).items())]


def test_every_family_is_there_with_all_values_of_its_labels() -> None:
    """From the first scrape on, or rates of what happens first would not see it. Only unknown gauges are missing."""
    found = series(run())
    unknown = {"loss", "committed_step", "checkpoint_last_success_timestamp_seconds", "checkpoint_bytes"}
    unknown |= {"checkpoint_free_bytes", "run_ended_timestamp_seconds"}
    names = {name for name, _ in found}
    for family in MINE:
        full = family.full_name.removeprefix(PREFIX)
        expected = f"{full}_count" if family.kind is MetricKind.HISTOGRAM else full
        assert (expected in names) is (family.name not in unknown), family.name
        if family.name not in unknown and "run" in family.labels:
            for values in label_values(family):
                value(found, expected, **dict(zip(family.values, values, strict=True)))
    assert {family.name for family in MINE if family.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)} == set(COUNTED)


def test_what_is_known_has_its_value() -> None:
    """State, limits, checkpoint, loss, step, nodes by state."""
    told = {
        "n0": health(
            "n0", [rank(0), rank(1, 1, compute_s=0.4)], saved=Saved(step=8, wall=77.0, bytes=9), save_interval_s=60.0
        ),
        "n1": health("n1", [rank(2), rank(3, 1)]),
    }
    found = series(run(health=told, progress=Progress(round=1, step=20, epoch=0, samples=1, loss=0.5)))
    assert value(found, "world_size") == 4
    assert value(found, "nodes", state="ready") == 2
    assert value(found, "nodes", state="done") == 0
    assert (value(found, "nodes_limit", bound="min"), value(found, "nodes_limit", bound="max")) == (1, 4)
    assert (value(found, "run_state", state="training"), value(found, "run_state", state="failed")) == (1, 0)
    assert (value(found, "loss"), value(found, "committed_step"), value(found, "stragglers")) == (0.5, 20, 1)
    assert value(found, "checkpoint_last_success_timestamp_seconds") == 77.0
    assert (value(found, "checkpoint_bytes"), value(found, "checkpoint_interval_seconds")) == (9, 60)
    assert value(found, "rendezvous_start_timestamp_seconds") == 0
    assert found["monitor_store_last_success_timestamp_seconds", frozenset()] == 4999.0
    assert [value(series(each), "shard_groups") for each in (grouped(), run())] == [2, 0]


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_a_run_that_is_over_says_since_when(outcome: str) -> None:
    """By its record, so that a monitor that comes later knows it too; no other outcome has a time."""
    ends = {"round_": {"result": outcome}, "journal": (entry(1), entry(1, RoundState.CLOSED, 4321.0))}
    found = series(run(state=RoundState.CLOSED, **ends))  # type: ignore[arg-type]
    ended = {labels: at for (name, labels), at in found.items() if name == "run_ended_timestamp_seconds"}
    assert ended == {frozenset({("run", "r"), ("outcome", outcome)}): 4321.0}


def test_counters_are_sums_and_do_not_go_back_when_a_node_goes() -> None:
    """A node's document outlives it; later its counts are in that of all that are gone."""
    counted: dict[str, Any] = {"samples": 10.0, "seconds.training": 5.0, "ended.node_lost": 1.0, "save.failed": 2.0}
    told = {"n0": health("n0", counters=counted), "n1": health("n1", counters=counted)}
    folded = {"n0": told["n0"], GONE: health(GONE, counters=counted)}
    for documents in (run(2, health=told), run(1, health=told), run(1, health=folded)):
        found = series(documents)
        assert value(found, "samples_total") == 20
        assert value(found, "time_seconds_total", phase="training") == 10
        assert value(found, "restarts_total", reason="node_lost") == 2
        assert value(found, "checkpoints_total", op="save", result="failed") == 4


def test_histograms_are_cumulative() -> None:
    """The nodes' counts are for each bound by itself; what no bound holds is in +Inf."""
    counted = {
        "recovery_s.failure.le.0.05": 1.0,
        "recovery_s.failure.le.0.2": 2.0,
        "recovery_s.failure.count": 4.0,
        "recovery_s.failure.sum": 500.0,
        "save_s.le.0.1": 1.0,
        "save_s.count": 1.0,
        "save_s.sum": 0.07,
    }
    found = series(run(health={"n0": health("n0", counters=counted)}))
    assert value(found, "recovery_seconds_bucket", kind="failure", le="0.05") == 1
    assert value(found, "recovery_seconds_bucket", kind="failure", le="0.1") == 1
    assert value(found, "recovery_seconds_bucket", kind="failure", le="300.0") == 3
    assert value(found, "recovery_seconds_bucket", kind="failure", le="+Inf") == 4
    assert value(found, "recovery_seconds_count", kind="failure") == 4
    assert value(found, "recovery_seconds_sum", kind="failure") == 500
    assert value(found, "recovery_seconds_count", kind="planned") == 0
    assert value(found, "checkpoint_duration_seconds_bucket", op="save", le="0.1") == 1
    assert value(found, "checkpoint_duration_seconds_bucket", op="save", le="0.03") == 0


def test_bounds_of_another_version_are_counted_with_the_next_higher_one() -> None:
    counted = {"h.le.0.7": 1.0, "h.le.5": 1.0, "h.le.inf": 1.0, "h.le.what": 1.0, "h.count": 5.0, "h.sum": 9.0}
    assert histogram(counted, "h", (0.5, 1.0)) == ([0.0, 1.0, 5.0], 9.0)


def test_the_series_of_a_run_vanish_an_hour_after_its_end_or_a_day_after_its_last_node() -> None:
    """Else they would grow for ever; nobody has ended a run without nodes, so that an alert about it must stay."""
    over, observer = run(state=RoundState.CLOSED, round_={"result": "succeeded"}), Observer()
    observer.observe(run(), 0.0, 5000.0)
    observer.observe(over, 1.0, 5001.0)
    for seconds, there in ((3599.0, True), (3601.0, False)):
        seen = {"r": RunReading(over, observer.observe(over, 1.0 + seconds, 5001.0 + seconds))}
        assert ('run="r"' in generate_latest(MonitorCollector(lambda: StoreReading(seen))).decode()) is there  # noqa: B023
    left = Observer()
    left.observe(run(0), 0.0, 5000.0)
    found = [RunReading(run(0), left.observe(run(0), at, 5000.0 + at)).forgotten(3600.0) for at in (80_000.0, 90_000.0)]
    assert found == [False, True]


def test_both_formats_can_be_parsed() -> None:
    """Prometheus' own and OpenMetrics, which is strict; several runs are several label values."""
    collector = MonitorCollector(lambda: reading(run(), run(run="other")))
    strict = openmetrics(collector).decode()  # type: ignore[no-untyped-call]
    names = {family.name for family in parse_openmetrics(strict)}  # type: ignore[no-untyped-call]
    assert {f"{PREFIX}{family.name}" for family in MINE} == names
    found = parse(generate_latest(collector).decode())
    assert {sample.labels.get("run") for family in found for sample in family.samples} == {"r", "other", None}
