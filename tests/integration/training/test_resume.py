"""Wherever a run is cut off, the resumed one has the same history and the same parameters, bit for bit."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.files import HISTORY_FILE
from elastic_trainer.jobs.mnist import Mnist
from elastic_trainer.jobs.trainer import CONFIG_FILE, FINAL_FILE, Trainer, exported_step
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import LaterLoss
from tests.integration.training.launch import QUICK, records
from tests.unit.checkpoint.states import same

pytestmark = pytest.mark.timeout(900)

STEPS = 16


class PowerCutError(Exception):
    """What ends a run in these tests, at a place of their choice."""


class Cut(Mnist):
    losses_left = 10**9
    measures_left = 10**9

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        Cut.losses_left -= 1
        if Cut.losses_left < 0:
            raise PowerCutError
        return super().loss(model, batch)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        Cut.measures_left -= 1
        if Cut.measures_left < 0:
            raise PowerCutError
        return super().metrics(model, batch)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logs.configure(io.StringIO())
    yield
    logs.configure()


def _config(directory: Path, *overrides: str) -> JobConfig:
    """16 steps in 2 epochs of 8, with dropout, so that random numbers matter."""
    fixed = [f"checkpoint.directory={directory}", "model.dropout=0.2", "checkpoint.every_s=null", "device=cpu"]
    return load_job("mnist", [*QUICK, *fixed, *overrides])


def _final_state(directory: Path) -> dict[str, Any]:
    """What was saved after the last evaluation (a scheduled checkpoint of that step came before it), without the note
    of which step was saved last on purpose: that tells of an interruption."""
    manager = CheckpointManager(directory)
    (entry,) = [each for each in manager.entries() if each.manifest.step == STEPS and each.manifest.metrics]
    state = dict(manager.load(entry).state)
    for name in ("saved_step", "concluded_step"):
        state["user"]["history"].pop(name)
    return {name: state[name] for name in ("model", "optimizer", "scheduler", "user")}


def test_an_evaluation_is_told_where_rank_0_is_by_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's node may be lost in the middle of it: the process that is rank 0 then tells of it."""

    class Moving(Mnist):
        here = False

        def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
            Moving.here = True
            return super().metrics(model, batch)

    monkeypatch.setattr(Session, "is_rank0", property(lambda _: Moving.here))
    trainer = Trainer(Moving, _config(tmp_path))
    Moving.here = False
    trainer.run()
    assert _told(tmp_path, "evaluation") == [8, 16]


def _told(directory: Path, kind: str = "loss") -> list[int]:
    told = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    return [each["step"] for each in told if each["kind"] == kind]


def test_a_loss_is_asked_for_a_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once all ranks would wait for all. Only an evaluation, or a checkpoint, must know it before."""
    asked_at, read = list[int](), LaterLoss.read

    def noted(later: LaterLoss) -> float | None:
        asked_at.append(later._steps.position.step)
        return read(later)

    monkeypatch.setattr(LaterLoss, "read", noted)
    quiet = "logging.progress=none"  # a line of progress asks too, and comes by the clock
    Trainer(Mnist, _config(tmp_path, "logging.loss_every=3", "checkpoint.every_steps=6", quiet)).run()
    assert _told(tmp_path) == [1, 3, 6, 9, 12, 15]
    assert asked_at == [2, 4, 6, 10, 12, 16]


def test_the_last_loss_before_an_error_is_told(tmp_path: Path) -> None:
    """Also where the error is in the very next step."""
    Cut.losses_left = 6
    with pytest.raises(PowerCutError):
        Trainer(Cut, _config(tmp_path, "logging.loss_every=2")).run()
    assert _told(tmp_path) == [1, 2, 4, 6]


@pytest.mark.parametrize("export", [True, False])
def test_a_finished_run_started_again_exports_what_it_had_not_come_to(tmp_path: Path, export: bool) -> None:
    """It may have been ended between its last checkpoint and the file of the model."""
    config = _config(tmp_path, f"checkpoint.export={str(export).lower()}")
    Trainer(Mnist, config).run()
    assert (tmp_path / FINAL_FILE).exists() == export
    step = exported_step(tmp_path / FINAL_FILE)
    (tmp_path / FINAL_FILE).unlink(missing_ok=True)
    (tmp_path / HISTORY_FILE).unlink()
    Trainer(Mnist, config).run()
    assert (step, (tmp_path / FINAL_FILE).exists()) == (16 if export else None, export)
    assert exported_step(tmp_path / FINAL_FILE) == step
    assert (tmp_path / HISTORY_FILE).exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    logs.configure(io.StringIO())
    directory = tmp_path_factory.mktemp("whole")
    report = Trainer(Mnist, _config(directory, "checkpoint.every_steps=1")).run()
    return report, directory


@pytest.mark.parametrize(
    ("every_steps", "losses", "measures"),
    [
        pytest.param(1, 5, None, id="mid-epoch"),
        pytest.param(3, 7, None, id="some steps after a checkpoint"),
        pytest.param(4, None, 0, id="between the end of an epoch and its evaluation"),
        pytest.param(4, None, 2, id="in the middle of an evaluation"),
        pytest.param(3, 10, None, id="after a record that the checkpoint does not have"),
        pytest.param(1, None, 5, id="in the last evaluation"),
    ],
)
def test_a_resumed_run_ends_bitwise_like_an_uninterrupted_one(
    tmp_path: Path,
    whole: tuple[dict[str, Any], Path],
    every_steps: int,
    losses: int | None,
    measures: int | None,
) -> None:
    """Parameters, optimizer, learning rates, histories and final metrics are equal."""
    Cut.losses_left = losses if losses is not None else 10**9
    Cut.measures_left = (measures if measures is not None else 10**9) + 1  # one sample is measured beforehand
    config = _config(tmp_path, f"checkpoint.every_steps={every_steps}")
    with pytest.raises(PowerCutError):
        Trainer(Cut, config).run()
    resumed = Trainer(Mnist, config).run()
    report, directory = whole
    assert resumed["resumed_from"] is not None
    for name in ("step", "epoch", "metrics", "train_loss", "best"):
        assert resumed[name] == report[name], name
    assert records(tmp_path) == records(directory)
    assert same(_final_state(tmp_path), _final_state(directory))


def test_another_learning_rate_is_refused_or_trained_with(tmp_path: Path) -> None:
    """By its name in the configuration, which is not written until it is true."""
    steady = "scheduler={name: none}"
    Trainer(Mnist, _config(tmp_path, steady)).run()
    other = (steady, "optimizer.lr=0.02", "epochs=3")
    with pytest.raises(ConfigError, match=r"'optimizer\.lr' is 0\.02 here and was .*--allow-changed optimizer\.lr"):
        Trainer(Mnist, _config(tmp_path, *other)).run()
    assert "lr: 0.02" not in (tmp_path / CONFIG_FILE).read_text()
    Trainer(Mnist, _config(tmp_path, *other, "checkpoint.allow_changed=[optimizer.lr]")).run()
    assert "lr: 0.02" in (tmp_path / CONFIG_FILE).read_text()
    assert records(tmp_path)[-1]["lr"] == 0.02


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    """Of many checkpoints the last few and the one with the best metric stay."""
    overrides = ["evaluation.every_steps=1", "checkpoint.keep_last=1", "optimizer.lr=0.03"]
    best_by = ["checkpoint.metric=loss", "checkpoint.mode=min"]
    report = Trainer(Mnist, _config(tmp_path, *overrides, *best_by)).run()
    losses = {record["step"]: record["metrics"]["loss"] for record in records(tmp_path)}
    best_step = min(losses, key=lambda step: losses[step])
    assert report["best"]["step"] == best_step
    best = CheckpointManager(tmp_path).best()
    assert best is not None
    assert best.manifest.step == best_step
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert len(kept) == len({best_step, report["step"]})


def test_without_a_metric_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    """No best metric, no evaluation but the last: the end of the run is saved and measured all the same."""
    config = _config(tmp_path, "checkpoint.metric=null", "evaluation.every_epochs=null")
    report = Trainer(Mnist, config).run()
    assert report["best"] is None
    assert [record["step"] for record in records(tmp_path)] == [16]
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_max_steps_ends_in_mid_epoch_and_can_be_raised(tmp_path: Path, whole: tuple[dict[str, Any], Path]) -> None:
    """A run cut short by max_steps is measured there and goes on from the same sample when the limit is raised."""
    short = Trainer(Mnist, _config(tmp_path, "max_steps=3")).run()
    assert (short["step"], short["epoch"]) == (3, 0)
    longer = Trainer(Mnist, _config(tmp_path)).run()
    assert longer["step"] == whole[0]["step"]
    assert [(record["step"], record["samples"]) for record in records(tmp_path)] == [(3, 75), (8, 0), (16, 0)]
