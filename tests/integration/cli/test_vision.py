"""The tasks on images train through faults on a real cluster: nothing is lost of the training, and it succeeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.test_local import Local

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("etcd_binary")]

FAULTS = (
    *("--nodes", "2:3", "--start", "2", "--recovery", "in_place"),
    *("--join-at", "4", "--kill-worker-at", "20:n0", "--kill-node-at", "40:n1"),
)
"""One more node comes, one of the first two loses its worker, the other one is killed: none trains on without the new
one, however fast the machine is."""
QUICK = ("evaluation.every_epochs=null", "checkpoint.every_steps=40")


@pytest.fixture
def started() -> Iterator[list[Local]]:
    """Commands to end after the test."""
    commands: list[Local] = []
    yield commands
    for command in commands:
        command.kill()


def survived(directory: Path, started: list[Local], *job: str) -> dict[str, Any]:
    """The summary of a job that went through the faults, once it is certain that it did."""
    command = Local(directory, *FAULTS, job=(*job, *QUICK))
    started.append(command)
    assert command.wait() == 0, command.said()
    summary = command.summary()
    kinds = [fault["what"].split(" ")[0] for fault in summary["faults"]]
    assert sorted(kinds) == ["node", "node", "worker"], summary["faults"]
    assert command.committed_again() == 0
    assert "n2" in summary["rounds"][-1]["nodes"], summary["rounds"]
    assert summary["audit"]["exact"], summary["audit"]
    assert command.left() == []
    return summary


def test_images_are_told_apart_after_faults(tmp_path: Path, started: list[Local]) -> None:
    """On class folders that all nodes write at once: a killed worker and a newcomer cost no step and no sample."""
    job = ("imagefolder", f"data.cache={tmp_path / 'cache'}", "data.limit=600", "epochs=10", "model.width=4")
    summary = survived(tmp_path, started, *job, "sync_batchnorm=false")
    assert summary["audit"]["steps"] == 120
    assert [epoch["used"] for epoch in summary["audit"]["epochs"]] == [600] * 10
    assert summary["metrics"]["top1"] > 0.7
    (record,) = [json.loads(line) for line in (tmp_path / "run/checkpoints/metrics.jsonl").read_text().splitlines()]
    assert record["step"] == 120
    assert math.isfinite(record["train_loss"])


def test_key_points_are_found_after_faults(tmp_path: Path, started: list[Local]) -> None:
    """With the statistics of all ranks in every norm: a killed worker and a newcomer cost no step and no sample."""
    network = ("model.channels=[8, 16]", "model.stages=[{branches: 1, blocks: 1}, {branches: 2, blocks: 1}]")
    job = ("keypoints", "data.count=400", "data.test_count=60", "epochs=5", "global_batch=10")
    summary = survived(tmp_path, started, *job, *network, "scheduler.milestones=[4]")
    assert summary["audit"]["steps"] == 200
    assert [epoch["used"] for epoch in summary["audit"]["epochs"]] == [400] * 5
    assert summary["metrics"]["point_f1"] > 0.6
    assert summary["metrics"]["heat_loss"] < 0.003
