"""The shipped routes in a real Alertmanager, beside an exporter that plays a job in which two things go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM
from elastic_trainer.telemetry import families
from tests.integration.health.exporter import FakeExporter, Row
from tests.support.watch import Watch

RUN = {"run": "a"}


@dataclass
class Played:
    """A job of some ranks on one node, and its monitor."""

    ranks: int = 3
    stuck_since: float | None = None
    store_since: float | None = None
    failed_saves: float = 0.0
    saved: float = field(default_factory=lambda: SYSTEM.wall() - 3600.0)

    def node(self) -> list[Row]:
        moved = SYSTEM.wall() if self.stuck_since is None else self.stuck_since
        told = SYSTEM.wall() if self.store_since is None else self.store_since
        rows: list[Row] = [(families.STORE_SUCCESS, {**RUN, "node": "n0"}, told)]
        for number in range(self.ranks):
            me = {**RUN, "rank": str(number)}
            rows += [
                (families.LAST_STEP, me, moved),
                (families.STEP_DURATION, me, 0.01),
                (families.COMPUTE_DURATION, me, 0.008),
                *((families.PHASE, {**me, "phase": each}, float(each == "training")) for each in families.PHASES),
            ]
        return rows

    def monitor(self) -> list[Row]:
        state = [
            (families.RUN_STATE, {**RUN, "state": each}, float(each == "training")) for each in families.RUN_STATES
        ]
        nodes = [(families.NODES, {**RUN, "state": each}, float(each == "ready")) for each in families.NODE_STATES]
        bounds = [(families.NODES_LIMIT, {**RUN, "bound": each}, 1.0) for each in families.BOUNDS]
        saves = [
            (
                families.CHECKPOINTS,
                {**RUN, "op": op, "result": each},
                self.failed_saves if (op, each) == FAILED else 0.0,
            )
            for op in families.OPERATIONS
            for each in families.RESULTS
        ]
        return [
            *state, *nodes, *bounds, *saves,
            (families.WORLD_SIZE, RUN, float(self.ranks)),
            (families.ROUND, RUN, 1.0),
            (families.CHECKPOINT_SUCCESS, RUN, self.saved),
            (families.MONITOR_STORE, {}, SYSTEM.wall()),
        ]  # fmt: skip


FAILED = ("save", "failed")


@pytest.fixture
def job() -> Played:
    return Played()


@pytest.fixture
def watch(job: Played, tmp_path: Path) -> Iterator[Watch]:
    """A Watch beside ``job``, in which a minute takes two seconds."""
    with (
        FakeExporter(job.node) as node,
        FakeExporter(job.monitor) as monitor,
        Watch(tmp_path / "watch", nodes=[node.endpoint], monitors=[monitor.endpoint]) as started,
    ):
        started.wait_value("run:elastic_trainer_ranks:count == 3")
        started.wait_value("run:elastic_trainer_under_way:fresh == 1")
        yield started


def test_a_cause_is_told_and_what_follows_from_it_is_not(job: Played, watch: Watch) -> None:
    """Without etcd the run stands still: both alerts fire, and only the one about etcd is sent."""
    job.stuck_since = job.store_since = SYSTEM.wall()
    watch.wait_message("ElasticTrainerStoreUnreachable", run="a")
    watch.wait_alert("ElasticTrainerStalled", run="a")
    job.failed_saves = 4.0  # something else, which is told later than the stall would have been
    watch.wait_message("ElasticTrainerCheckpointFailing", run="a")
    assert "ElasticTrainerStalled" not in {message.name for message in watch.mailbox.messages}
