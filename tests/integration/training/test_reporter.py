"""What a job leaves for people and for other programs, from a real run that is stopped in the middle and goes on."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_model

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CANNOT_WRITE, EXIT_CONFIG
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.files import STEPS_FILE
from elastic_trainer.jobs.loggers import TENSORBOARD_DIRECTORY, Opening, TensorBoard
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


def events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

    found = EventAccumulator(str(directory / TENSORBOARD_DIRECTORY))
    found.Reload()
    return found


def test_a_run_of_two_lives_leaves_its_course_pictures_and_models(run: Path) -> None:
    """Losses at the steps that are looked at, both evaluations, and where each life began; in TensorBoard each point
    once, and a picture of the first test samples after each evaluation; models that need nothing of this package."""
    told = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told if line["kind"] == "loss"] == [1, 2, 4, 6, 8]
    assert [line["step"] for line in told if line["kind"] == "evaluation"] == [4, 8]
    assert [(line["step"], line["round"]) for line in told if line["kind"] == "round"] == [(0, 0), (4, 1)]
    found = events(run)
    assert [each.step for each in found.Scalars("train/loss")] == [1, 2, 4, 6, 8]
    assert [each.step for each in found.Scalars("test/pck")] == [4, 8]
    assert found.Tags()["images"] == ["test 0", "test 1", "test 2", "test 3"]
    assert [each.step for each in found.Images("test 0")] == [4, 8]
    task = find_task("keypoints")(load_job(str(run / "config.yaml")))
    task.datasets()
    for name, steps in (("final_state", {"8"}), ("best_model", {"4", "8"})):
        path = run / f"{name}.safetensors"
        assert not any(load_model(task.model(), path))  # nothing is missing, nothing is left
        with safe_open(path, "pt") as file:
            assert file.metadata()["task"] == "keypoints"
            assert file.metadata()["step"] in steps


def test_points_behind_a_checkpoint_that_was_fallen_back_to_are_hidden(tmp_path: Path) -> None:
    """A run that begins again at step 10 shows its second try of step 20 only."""
    for begins, points in ((0, {10: 3.0, 20: 2.0}), (10, {20: 1.0})):
        board = TensorBoard(Opening(tmp_path, begins))
        for step, loss in points.items():
            board.scalars("train", {"loss": loss}, step)
        board.close(begins > 0)
    assert [(each.step, each.value) for each in events(tmp_path).Scalars("train/loss")] == [(10, 3.0), (20, 1.0)]


FAULTY = [
    {"kind": "round", "step": 0, "round": 1, "world_size": 3, "reason": "3 nodes are present"},
    {"kind": "loss", "step": 10, "loss": 2.0},
    {"kind": "evaluation", "step": 10, "metrics": {"accuracy": 0.5}},
    {"kind": "round", "step": 11, "round": 2, "world_size": 2, "reason": "node n2 was lost"},
    {"kind": "loss", "step": 20, "loss": 0.05},
]


def test_a_run_is_drawn_with_its_faults_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the run if no other place is named."""
    (tmp_path / STEPS_FILE).write_text("".join(json.dumps(line) + "\n" for line in FAULTY))
    output = tmp_path / "run.svg"
    assert main(["plot", str(tmp_path), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert "round 2: node n2 was lost (3 to 2 ranks)" in output.read_text()
    ElementTree.parse(output)
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--output", "x.gif"], EXIT_CONFIG, "not .png, .svg or .pdf"),
        (["--outptu", "x.svg"], EXIT_CONFIG, "unrecognized arguments"),
        (["--output", "/no/such/x.svg"], EXIT_CANNOT_WRITE, "cannot be written"),
    ],
)
def test_a_mistake_in_drawing_is_one_sentence(
    run: Path, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run), *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


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
