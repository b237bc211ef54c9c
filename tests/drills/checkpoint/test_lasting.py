"""A disk that fills, or turns read-only, under a running training: it goes on, and saves again when it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_trainer.checkpoint import CheckpointManager, Soundness, describe
from elastic_trainer.cli.main import main as command
from elastic_trainer.drills.measure import Book
from elastic_trainer.errors import EXIT_CANNOT_WRITE
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.curves import read_curves
from elastic_trainer.jobs.mnist import Mnist
from elastic_trainer.jobs.trainer import BEST_FILE, FINAL_FILE, Trainer, exported_step
from elastic_trainer.local.ledger import audit
from tests.drills.checkpoint.lasting import SAVE_EVERY
from tests.drills.endings.job import LASTING, Job
from tests.integration.training.launch import QUICK, ran, records
from tests.support.small_disk import fill, mounted
from tests.unit.checkpoint.states import newest_of

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

SCRIPT = ["-m", "tests.drills.checkpoint.lasting"]
STEPS = 48
FAULTS = {10: "full", 19: "free", 26: "read_only", 30: "die", 38: "writable"}
REFUSED = {12, 16, 28, 32, 36}
"""The saves of the script that fall into these times."""
MB = 1 << 20


def scenario(out: Path, checkpoints: Path, **more: Any) -> str:
    out.mkdir()
    values = {"out": str(out), "checkpoints": str(checkpoints), "steps": STEPS, "faults": {}, **more}
    return json.dumps(values)


def alone(text: str) -> int:
    return ran([*SCRIPT, text]).code


def saves(out: Path, rank: int) -> dict[int, str | None]:
    return dict(json.loads(line) for line in (out / f"saves-{rank}.jsonl").read_text().splitlines())


@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_disk_that_fails_under_a_running_job_costs_no_step(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes; the disks of checkpoints, ledger and logs fill and are freed, that of the checkpoints turns read-only
    and writable again, and a worker dies in between. Each refused save is told to all ranks, counted and logged; later
    ones are whole; the parameters have the bits of a run without any of it."""
    assert alone(scenario(tmp_path / "reference", tmp_path / "reference" / "checkpoints")) == 0
    with mounted(tmp_path / "disk", 16 * MB) as disk, mounted(tmp_path / "job", 16 * MB) as directory:
        out, checkpoints = tmp_path / "out", disk / "checkpoints"
        text = scenario(out, checkpoints, disks=[str(disk), str(directory)], faults=FAULTS)
        options = LASTING | {"recovery": recovery}
        with Job(directory, etcd_endpoint, run_id, entry=[*SCRIPT, text], most=2, options=options) as job:
            job.start(2)
            assert job.exit_codes() == {"n0": 0, "n1": 0}, job.describe()
            lines = job.lines()
            assert all("session.unsaved" not in job.log(node.name) for node in job.nodes)
        assert {each.name for each in out.glob("fault-*")} == {f"fault-{step}" for step in FAULTS}
        told = saves(out, 0)
        assert {step for step, name in told.items() if name is None} == REFUSED
        assert told.keys() == set(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
        assert saves(out, 1).items() <= told.items()
        assert {each.status for each in describe(checkpoints)} == {Soundness.VERIFIED}
        newest = newest_of(CheckpointManager(checkpoints))
        assert newest.manifest.step == STEPS
    found = audit(lines)
    assert found.exact, found.reason
    assert found.steps == STEPS
    assert Book(lines).committed_again() == 0
    assert recovery == "in_place" or found.steps_rolled_back > 0, found
    digests = {path.read_text() for path in (*out.glob("digest-*"), *(tmp_path / "reference").glob("digest-*"))}
    assert len(digests) == 1
    capsys.readouterr()
    assert command(["events", run_id, "--endpoint", etcd_endpoint]) == 0
    assert "checkpoint_failed" in capsys.readouterr().out


@pytest.mark.parametrize(("required", "code"), [(False, 0), (True, EXIT_CANNOT_WRITE)])
def test_the_last_save_ends_a_job_only_if_asked(tmp_path: Path, required: bool, code: int) -> None:
    with mounted(tmp_path / "disk", 16 * MB) as disk:
        faults = {10: "full"}
        more = {"disks": [str(disk)], "faults": faults, "required": required}
        assert alone(scenario(tmp_path / "out", disk / "checkpoints", **more)) == code
    assert (tmp_path / "out" / "digest-0").exists()


class Unlucky(Mnist):
    disk: Path | None = None
    steps = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        Unlucky.steps += 1
        if self.disk is not None and Unlucky.steps == 3:
            fill(self.disk)
        if self.disk is not None and Unlucky.steps == 9:
            (self.disk / "ballast").unlink()
        return super().loss(model, batch)


def trained(directory: Path, disk: Path | None) -> dict[str, Any]:
    Unlucky.disk, Unlucky.steps = disk, 0
    more = [f"checkpoint.directory={directory}", "checkpoint.metric=loss", "checkpoint.mode=min"]
    more += ["checkpoint.every_s=0.01", "evaluation.every_steps=2"]
    return Trainer(Unlucky, load_job("mnist", [*QUICK, *more])).run()


def test_a_full_disk_does_not_end_the_trainer_with_a_metric(tmp_path: Path) -> None:
    """Each evaluation is the best so far, which is saved at once. What is beside the checkpoints catches up later, and
    the model at the end is the one of a run on a sound disk."""
    reference = trained(tmp_path / "reference", None)
    with mounted(tmp_path / "disk", 16 * MB) as disk:
        directory = disk / "run"
        report = trained(directory, disk)
        assert report["metrics"] == reference["metrics"]
        assert report["best"] == reference["best"]
        assert [each["step"] for each in records(directory)] == [
            each["step"] for each in records(tmp_path / "reference")
        ]
        mine, theirs = (load_file(each / FINAL_FILE) for each in (directory, tmp_path / "reference"))
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert exported_step(directory / BEST_FILE) == report["best"]["step"] == 16
        assert {each.status for each in describe(directory)} == {Soundness.VERIFIED}
        assert set(read_curves(directory).losses) >= {1, 2, *range(10, 17)}
