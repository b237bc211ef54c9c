"""Whole jobs on real digits: alone, with several ranks, resumed, and to the accuracy that they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.jobs.config import load_job
from tests.integration.training.launch import LIMIT_S, QUICK, command, records, train
from tests.integration.worker.launch import environment
from tests.support.forked import Forked
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)

USER_TASK = '''
"""A task of a user's own: fits a plane."""
import torch
from elastic_trainer import Task
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.task import Datasets


class Plane(Task):
    """Fits a plane through exact points."""

    class Data(Section):
        points: int = 64

    def datasets(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(self.data_options.points, 2, generator=generator)
        data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[2.0], [-1.0]]) + 0.5)
        return Datasets(train=data, test=data)

    def model(self):
        return torch.nn.Linear(2, 1)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)

    def metrics(self, model, batch):
        return {"error": ((model(batch.x) - batch.y).square().sum(), len(batch.x))}
'''

USER_JOB = """
task: plane:Plane
epochs: 60
global_batch: 16
optimizer: {name: sgd, lr: 0.2, momentum: 0.9}
scheduler: {name: step, every_epochs: 40, gamma: 0.1}
evaluation: {every_epochs: 20}
checkpoint: {directory: out, metric: error, mode: min}
"""


def test_a_users_own_task_runs_from_its_own_directory(tmp_path: Path) -> None:
    """module:Class and a YAML file are all that a user writes; the plane is found, config and metrics are kept."""
    (tmp_path / "plane.py").write_text(USER_TASK)
    (tmp_path / "job.yaml").write_text(USER_JOB)
    outcome = train("job.yaml", "data.points=40", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    report = outcome.report
    assert report["step"] == 60 * 3
    assert report["metrics"]["error"] < 1e-6
    assert report["best"]["error"] == min(record["metrics"]["error"] for record in records(tmp_path / "out"))
    assert [record["epoch"] for record in records(tmp_path / "out")] == [20, 40, 60]
    kept = load_job(str(tmp_path / "out" / "config.yaml"))
    assert kept.data == {"points": 40}
    assert kept.task == "plane:Plane"


def test_two_ranks_train_together_and_a_finished_job_stays_finished(tmp_path: Path) -> None:
    """One report, one set of files; the same command again trains nothing, reports the same and saves nothing."""
    arguments = ["mnist", *QUICK, f"checkpoint.directory={tmp_path}", "micro_batch=4", "clip_norm=1.0"]
    first = train(*arguments, world=2)
    assert first.code == 0, first.err
    report = first.report
    assert (report["rank"], report["world_size"], report["step"], report["epoch"]) == (0, 2, 16, 2)
    assert [record["step"] for record in records(tmp_path)] == [8, 16]
    before, names = (tmp_path / "metrics.jsonl").read_bytes(), {path.name for path in tmp_path.iterdir()}
    again = train(*arguments, world=2)
    assert again.code == 0, again.err
    assert again.report["metrics"] == report["metrics"]
    assert again.report["step"] == 16
    assert again.report["resumed_from"] is not None
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_job_stopped_by_sigterm_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """SIGTERM in mid-run: exit code 143, and the resumed run ends with the very metrics of one without a stop."""
    long = ["mnist", *QUICK, "epochs=15", "data.limit=400", "checkpoint.every_s=null"]
    whole = train(*long, f"checkpoint.directory={tmp_path / 'whole'}")
    assert whole.code == 0, whole.err
    interrupted = tmp_path / "interrupted"
    out, err = tmp_path / "out", tmp_path / "err"
    err.touch()
    process = Forked([*command(), *long, f"checkpoint.directory={interrupted}"], environment(), out, err)
    eventually(lambda: '"training.evaluated"' in err.read_text(), err.read_text, LIMIT_S)
    process.terminate()
    assert process.wait(LIMIT_S) == EXIT_LEFT, err.read_text()
    assert "Traceback" not in err.read_text()
    assert len(records(interrupted)) < 15
    resumed = train(*long, f"checkpoint.directory={interrupted}")
    assert resumed.code == 0, resumed.err
    assert resumed.report["resumed_from"] is not None
    assert resumed.report["metrics"] == whole.report["metrics"]
    assert records(interrupted) == records(tmp_path / "whole")
