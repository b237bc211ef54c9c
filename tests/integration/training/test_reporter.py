"""What a job leaves for people and for other programs, from a real run that is stopped in the middle and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_model

from elastic_trainer.cli.main import main
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.task import find_task
from tests.integration.training.launch import train

pytestmark = pytest.mark.timeout(900)

SMALL = (
    "data.count=40",
    "data.test_count=10",
    "model.channels=[4, 8]",
    "model.stages=[{branches: 1, blocks: 1}, {branches: 2, blocks: 1}]",
    "global_batch=10",
    "logging.loss_every=2",
    "logging.tensorboard=true",
    "scheduler.milestones=[1]",
    "checkpoint.metric=pck",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key points: one epoch, and then another one in a second life."""
    directory = tmp_path_factory.mktemp("run")
    for epochs in (1, 2):
        done = train("keypoints", *SMALL, f"epochs={epochs}", f"checkpoint.directory={directory}")
        assert done.code == 0, done.err
        assert done.report["step"] == 4 * epochs
    return directory


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def test_the_course_of_a_run_is_kept_through_its_lives(run: Path) -> None:
    """Losses at the steps that are looked at, both evaluations, and where each life began."""
    told = lines(run)
    assert [line["step"] for line in told if line["kind"] == "loss"] == [1, 2, 4, 6, 8]
    assert [line["step"] for line in told if line["kind"] == "evaluation"] == [4, 8]
    assert [(line["step"], line["round"]) for line in told if line["kind"] == "round"] == [(0, 0), (4, 1)]
    assert main(["plot", str(run), "--output", str(run / "run.svg")]) == 0


def test_tensorboard_shows_scalars_and_pictures_with_points(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("train/loss")] == [1, 2, 4, 6, 8]
    assert [each.step for each in events.Scalars("test/pck")] == [4, 8]
    pictures = events.Tags()["images"]
    assert pictures == ["test 0", "test 1", "test 2", "test 3"]
    assert [each.step for each in events.Images("test 0")] == [4, 8]


def test_the_models_can_be_loaded_without_this_package(run: Path) -> None:
    task = find_task("keypoints")(load_job(str(run / "config.yaml")))
    task.datasets()
    for name, steps in (("final_state", {"8"}), ("best_model", {"4", "8"})):
        path = run / f"{name}.safetensors"
        missing, unexpected = load_model(task.model(), path)
        assert not missing
        assert not unexpected
        with safe_open(path, "pt") as file:
            assert file.metadata()["task"] == "keypoints"
            assert file.metadata()["step"] in steps


BROKEN = """
import torch
from elastic_trainer import Datasets, Task


class Broken(Task):
    def datasets(self):
        data = torch.utils.data.TensorDataset(torch.ones(8, 1), torch.ones(8, 1))
        return Datasets(train=data, test=data)

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return (model(batch.x) - batch.y).square().mean()

    def metrics(self, model, batch):
        return {"error": ((model(batch.x) - batch.y).square().sum(), len(batch))}

    def exhibits(self, model, batch):
        raise ValueError("no picture")
"""


def test_a_picture_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    """Rank 0 alone makes it; the traceback is told, and the others never wait for a rank that is gone."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "job.yaml").write_text(
        "task: broken:Broken\nepochs: 2\nglobal_batch: 4\nlogging: {tensorboard: true}\n"
    )
    done = train("job.yaml", world=2, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.report["step"] == 4
    assert len(done.events("exhibits.failed")) == 2
    assert "ValueError: no picture" in done.err
