"""A run drawn, and shown in TensorBoard."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CANNOT_WRITE, EXIT_CONFIG
from elastic_trainer.jobs.files import STEPS_FILE
from elastic_trainer.jobs.loggers import TENSORBOARD_DIRECTORY, Opening, TensorBoard

RUN = [
    {"kind": "round", "step": 0, "round": 1, "world_size": 3, "reason": "3 nodes are present"},
    {"kind": "loss", "step": 10, "loss": 2.0},
    {"kind": "evaluation", "step": 10, "metrics": {"accuracy": 0.5}},
    {"kind": "round", "step": 11, "round": 2, "world_size": 2, "reason": "node n2 was lost"},
    {"kind": "loss", "step": 20, "loss": 0.05},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / STEPS_FILE).write_text("".join(json.dumps(line) + "\n" for line in RUN))
    return tmp_path


def test_a_run_is_drawn_with_its_faults_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run / "run.svg"
    assert main(["plot", str(run), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    text = output.read_text()
    assert "round 2: node n2 was lost (3 to 2 ranks)" in text
    ElementTree.fromstring(text)


def test_without_a_name_it_goes_beside_the_run(run: Path) -> None:
    assert main(["plot", str(run)]) == 0
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--output", "x.gif"], EXIT_CONFIG, "not .png, .svg or .pdf"),
        (["--outptu", "x.svg"], EXIT_CONFIG, "unrecognized arguments"),
        (["--output", "/no/such/x.svg"], EXIT_CANNOT_WRITE, "cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence(
    run: Path, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(run), *arguments]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def points(directory: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]]]:
    """Scalars by tag, and the tags of images and texts, from the event files in ``directory``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / TENSORBOARD_DIRECTORY))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
    return scalars, {"images": tags["images"], "tensors": tags["tensors"]}


def test_points_behind_a_checkpoint_that_was_fallen_back_to_are_hidden(tmp_path: Path) -> None:
    """A run that begins again at step 10 shows its second try of step 20 only."""
    first = TensorBoard(Opening(tmp_path, 0))
    first.scalars("train", {"loss": 3.0}, 10)
    first.scalars("train", {"loss": 2.0}, 20)
    first.close(False)
    second = TensorBoard(Opening(tmp_path, 10))
    second.scalars("train", {"loss": 1.0}, 20)
    second.close(True)
    assert points(tmp_path)[0]["train/loss"] == [(10, 3.0), (20, 1.0)]
