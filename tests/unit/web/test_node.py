"""What Prometheus finds at a node, and what its endpoint refuses before it listens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import CollectorRegistry

from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.model import Phase
from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import FAMILIES, Family, MetricKind, MetricSource
from elastic_trainer.web.node import NodeCollector, NodeEndpoint
from elastic_trainer.web.server import metrics
from tests.unit.agent.readings import reading

NODE_FAMILIES = [family for family in FAMILIES if family.source is MetricSource.NODE]


class Node:
    def __init__(self, *living: Reading, store: Callable[[], tuple[int, float]] | None = None) -> None:
        self.living = list(living)
        self.collector = NodeCollector(
            "job",
            "n1",
            lambda: list(self.living),
            lambda each: each.pulse.nonfinite + 10,
            lambda: {"workers_killed": 2.0},
            store,
        )

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for metric in self.collector.collect():
            for sample in metric.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
        return found

    def values(self, family: Family, **labels: str) -> list[float]:
        wanted = labels.items()
        return [
            value
            for (name, told), value in self.samples().items()
            if name == family.full_name and wanted <= dict(told).items()
        ]


NOTES = {"node": "n1", "device": "cuda:0", "torch": "2.0", "version": "1.0", "started_wall": 50.0}


def worker(number: int = 0, **more: object) -> Reading:
    return reading(**{"pid": number + 1, "slot": number, "rank": number, "notes": NOTES, **more})  # type: ignore[arg-type]


def test_all_families_of_a_node_are_there_with_all_their_labels_and_values() -> None:
    """Named as the rules and dashboards name them; a family that is new fails here until it is exported."""
    node = Node(worker(), store=lambda: (3, 1234.5))
    told = {metric.name: metric for metric in node.collector.collect()}
    assert set(told) == {families.PREFIX + family.name for family in NODE_FAMILIES}
    for family in NODE_FAMILIES:
        metric = told[families.PREFIX + family.name]
        assert (metric.type, metric.documentation) == (str(family.kind), family.text)
        assert metric.samples
        for sample in metric.samples:
            assert sample.name == family.full_name
            assert set(sample.labels) == set(family.labels)
        for label, values in family.values.items():
            assert {sample.labels[label] for sample in metric.samples} == set(values)


def test_the_figures_are_those_of_the_page() -> None:
    node = Node(
        worker(4, step=7, stepped_wall=99.0, step_s=0.5, compute_s=0.25, nonfinite=1, allocated=8, reserved=9),
        store=lambda: (3, 1234.5),
    )
    for family, value in (
        (families.STEP, 7),
        (families.LAST_STEP, 99.0),
        (families.STEP_DURATION, 0.5),
        (families.COMPUTE_DURATION, 0.25),
        (families.NONFINITE, 11),
        (families.RANK_INFO, 1),
    ):
        assert node.values(family, run="job", rank="4") == [value]
    assert node.values(families.GPU_MEMORY, kind="allocated") == [8]
    assert node.values(families.GPU_MEMORY, kind="reserved") == [9]
    assert node.values(families.STORE_ERRORS, node="n1") == [3]
    assert node.values(families.STORE_SUCCESS, node="n1") == [1234.5]
    assert node.values(families.WORKERS_KILLED, node="n1") == [2]
    assert node.values(families.RANK_INFO, device="cuda:0", torch="2.0", version="1.0", local_rank="4") == [1]


def test_ranks_come_and_go_with_their_pages() -> None:
    """The phase is that of the moment. Before the first step a rank shows when it started, so that an alert on the age
    of the last step works from the start. Of two that have one rank for a moment the one in the newer round counts:
    Prometheus would refuse the answer otherwise. Ranks without a place are not there, and those that go are gone."""
    node = Node(worker(0, phase=Phase.TRAINING, moment=Phase.DATA), worker(1), reading(rank=-1, pid=9))
    told = {phase: node.values(families.PHASE, rank="0", phase=phase) for phase in families.PHASES}
    assert told == {phase: [float(phase == "data")] for phase in families.PHASES}
    assert node.values(families.LAST_STEP) == [50.0, 50.0]
    assert node.values(families.STEP, rank="1") == [0]
    assert len(node.values(families.STEP)) == 2
    del node.living[1]
    assert {dict(labels)["rank"] for _, labels in node.samples()} == {"0"}
    node.living[:] = [worker(0, rank=2, round=8, step=12), worker(1, rank=2, round=7, step=11)]
    assert node.values(families.STEP) == [12]
    node.living.clear()
    assert node.samples() == {}


def test_a_rank_has_few_series() -> None:
    """A thousand of them are to be scraped: 17 on a CPU, 2 more with a device; without a store none of the node."""
    assert len(Node(worker(notes={"device": "cpu"})).samples()) == 17
    found = Node(worker(), worker(1)).samples()
    assert len(found) == 2 * 19
    assert {name for name, _ in found} == {family.full_name for family in NODE_FAMILIES if "rank" in family.labels}


@pytest.mark.parametrize("living", [0, 1, 3])
def test_both_formats_are_read_by_prometheus_own_parsers(living: int) -> None:
    node = Node(*(worker(number) for number in range(living)), store=lambda: (3, 1234.5))
    wanted = node.samples()
    for text, read in (
        (generate_latest(node.collector).decode(), read_text),
        (generate_openmetrics(node.collector).decode(), read_openmetrics),  # type: ignore[no-untyped-call]
    ):
        told = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for metric in read(text)
            for sample in metric.samples
        }
        assert told == wanted


@pytest.mark.parametrize("version", ["abc", "", "1.0.0", "99", "-1", "1;version=2"])
def test_whatever_version_is_accepted_an_answer_comes(version: str) -> None:
    for kind in ("application/openmetrics-text", "text/plain"):
        assert metrics(Node(worker()).collector, f"{kind};version={version}").status == 200


def test_names_are_unique_and_kinds_fit_them() -> None:
    """Counters end in _total, and times tell their unit."""
    assert len({family.full_name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.full_name.endswith("_total") is (family.kind is MetricKind.COUNTER)
        assert bool(family.buckets) is (family.kind is MetricKind.HISTOGRAM)
        assert list(family.buckets) == sorted(family.buckets)
        assert set(family.values) <= set(family.labels)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"short\n", "fewer than 8 characters"),
        (b"a secret of words\n", "not one word of ASCII"),
        (b"first-line\nsecond-line\n", "not one word of ASCII"),
        ("geheimnisträger\n".encode(), "not one word of ASCII"),
        (b"\xff\xfe\xfd", "cannot be read"),
    ],
)
def test_a_token_that_no_reader_could_present_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """A header carries one word; otherwise each scrape would be refused, and nobody would know why."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        NodeEndpoint("127.0.0.1", 0, CollectorRegistry(), token_file=file)
