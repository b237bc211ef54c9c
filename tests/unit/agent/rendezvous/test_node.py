"""Before a node joins: which numbers of nodes a round may have, and what comes of a finding about the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from elastic_trainer.agent.rendezvous import restart as node_module
from elastic_trainer.agent.rendezvous.restart import allowed_sizes, ensure_fit
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import EXIT_UNFIT, ConfigError, UnfitError
from elastic_trainer.membership.documents import Incident
from elastic_trainer.model import PreflightMode
from elastic_trainer.preflight.comparison import published
from elastic_trainer.preflight.examination import Examination, Subject
from elastic_trainer.preflight.judge import Finding, FitLimits, Status
from elastic_trainer.settings import RendezvousOptions, rendezvous_options
from elastic_trainer.store.api import RunKeys
from tests.support.memory_store import MemoryBackend, MemoryStore


@pytest.mark.parametrize(
    ("options", "low", "allowed"),
    [
        ({}, 1, ()),
        ({"sizes": "4:1:2:16"}, 1, (1, 2, 4)),
        ({"multiple_of": "3"}, 1, (3, 6)),
        ({"sizes": "1:2:4", "multiple_of": "2"}, 1, (2, 4)),
        ({"shard_nodes": "2"}, 2, (2, 4, 6, 8)),  # --nnodes counts nodes: these are one to four groups
        ({"shard_nodes": "2", "multiple_of": "4"}, 2, (4, 8)),
        ({"shard_nodes": "2", "sizes": "2:8"}, 2, (2, 8)),
    ],
)
def test_sizes_are_those_between_min_and_max(options: dict[str, str], low: int, allowed: tuple[int, ...]) -> None:
    assert allowed_sizes(rendezvous_options(options), low, 8) == allowed


@pytest.mark.parametrize(
    ("options", "low", "high", "said"),
    [
        ({"sizes": "9:10"}, 1, 8, "sizes=9:10 allows no node count within --nnodes 1:8"),
        ({"multiple_of": "16"}, 1, 8, "multiple_of=16 allows no node count within --nnodes 1:8"),
        ({"shard_nodes": "2"}, 2, 7, "--nnodes 2:7 does not divide into shard groups of 2 nodes"),
        ({"shard_nodes": "2", "sizes": "2:3:8"}, 2, 8, "sizes=2:3:8 does not divide into shard groups of 2 nodes"),
    ],
)
def test_sizes_that_no_round_could_have_are_an_error(options: dict[str, str], low: int, high: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allowed_sizes(rendezvous_options(options), low, high)


KEYS = RunKeys("/p", "run")
VERSIONS = {"torch": "2.13.0"}


class Cluster:
    """A store, and nodes that are checked one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = MemoryBackend()
        self.store = MemoryStore(self.backend)
        self._monkeypatch = monkeypatch

    def check(self, node: str, *findings: Finding, mode: str = "refuse", speed: float = 100.0, **options: Any) -> None:
        measured = Finding("matmul.cpu.fp32", Status.OK, f"{speed}", speed, "GFLOP/s")

        def examine(subject: Subject, deadline: Deadline) -> Examination:
            return Examination((measured, *findings), VERSIONS)

        self._monkeypatch.setattr(node_module, "examine", examine)
        self._monkeypatch.setattr(node_module, "PEERS_WAIT_S", 0.0)
        given = RendezvousOptions(preflight=PreflightMode(mode), **options)
        subject = Subject("127.0.0.1", given.preflight_dir, 2, limits=FitLimits(ratio=given.preflight_ratio))
        ensure_fit(self.store, KEYS, given, subject, node, 3, SYSTEM)

    def incidents(self) -> list[Incident]:
        items = self.store.range(KEYS.incidents, Deadline.after(5.0)).items
        return [Incident.decode(item.value, item.key) for item in items]

    def fit(self) -> dict[str, bool]:
        return {each.report.node: each.report.fit for each in published(self.store, KEYS, Deadline.after(5.0))}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def log() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


SICK = Finding("disk", Status.BAD, "/checkpoints cannot be written: no such device", hint="check its mount")


def test_a_good_node_joins_and_nobody_is_reported(cluster: Cluster, log: list[Any]) -> None:
    cluster.check("a")
    assert cluster.fit() == {"a": True}
    assert cluster.incidents() == []
    told = [entry["event"] for entry in log if entry["event"].startswith(("preflight.", "node."))]
    assert told == ["preflight.started", "preflight.finished"]


def test_a_sick_node_is_refused_with_one_sentence(cluster: Cluster, log: list[Any]) -> None:
    """An exit code that is not that of a wrong configuration, a hint, an incident, and lines in the log."""
    with pytest.raises(UnfitError) as raised:
        cluster.check("a", SICK)
    assert raised.value.exit_code == EXIT_UNFIT
    assert str(raised.value) == f"node a is not fit: disk: {SICK.text} (check its mount)"
    (incident,) = cluster.incidents()
    assert (incident.kind, incident.nodes, incident.by) == ("node_unfit", ("a",), "a")
    assert "it does not join" in incident.reason
    assert [entry["check"] for entry in log if entry["event"] == "node.unfit"] == ["disk"]
    assert cluster.fit() == {"a": False}


def test_a_slow_node_is_refused_once_there_are_two_to_compare_with(cluster: Cluster) -> None:
    """The third is compared with the first two, the fourth not with the refused third."""
    cluster.check("a")
    cluster.check("b", speed=90.0)
    with pytest.raises(UnfitError, match=r"matmul.cpu.fp32: 20 GFLOP/s is 0.21 of the median of 2 other nodes, 95"):
        cluster.check("c", speed=20.0)
    assert cluster.fit() == {"a": True, "b": True, "c": False}
    cluster.check("d", speed=60.0)
    cluster.check("e", speed=20.0, preflight_ratio=0.1)


def test_a_store_that_is_gone_refuses_nobody(cluster: Cluster, log: list[Any]) -> None:
    """A node that is well passes, though the comparison failed; a sick one is refused all the same."""
    cluster.backend.outage(True)
    cluster.check("a")
    (done,) = [entry for entry in log if entry["event"] == "preflight.finished"]
    assert done["fit"]
    with pytest.raises(UnfitError, match="/checkpoints cannot be written"):
        cluster.check("b", SICK)
