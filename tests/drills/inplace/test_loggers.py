"""Real trackers, offline, through a killed rank 0 and a life that falls back to a checkpoint: one run, rising steps."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from elastic_trainer.jobs.loggers import TrackedRun
from tests.drills.inplace.leading import leading
from tests.integration.training.launch import ran
from tests.support.requirements import missing

READ_MLFLOW = """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient()
found = client.search_runs([each.experiment_id for each in client.search_experiments()])
runs = [[each.info.status, each.data.params] for each in found]
for key in ("train/loss", "test/error"):
    print(json.dumps([each.step for each in client.get_metric_history(found[0].info.run_id, key)]))
print(json.dumps(runs))
"""


@pytest.mark.timeout(400)
def test_a_run_stays_one_run_of_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A, rank 0, is killed before step 5 and B before step 9; C resumes at 6, whose steps 7 and 8 are known."""
    for name in ("wandb", "mlflow"):
        if find_spec(name) is None:
            missing(f"{name} is not installed")
        monkeypatch.delenv(f"{name.upper()}_RUN_ID", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with leading(tmp_path) as lead:
        a, b = lead.start("a", "logged.py", 5), lead.start("b", "logged.py", 9)
        lead.form([a, b])
        lead.await_failed([b])
        lead.end()
        lead.await_ready([b])
        lead.form([b])
        lead.wait(lambda: b.process.poll() is not None, "b to die")
        c = lead.start("c", "logged.py", 0)
        lead.form([c])
        lead.await_done([c])
        assert [each.process.returncode for each in (a, b)] == [-signal.SIGKILL] * 2
        for worker in (a, b, c):
            assert "logger." not in worker.log.read_text()
    assert (tmp_path / "c.resumed").read_text().startswith("step-000000006-")
    (tmp_path / "read.py").write_text(READ_MLFLOW)
    done = ran([str(tmp_path / "read.py")], cwd=tmp_path)
    assert done.code == 0, done.err
    losses, errors, runs = (json.loads(line) for line in done.out.splitlines() if line.startswith("["))
    assert losses == [*range(1, 13)]
    assert errors == [12]
    assert runs == [["FINISHED", {"lr": "0.1"}]]
    lives = list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in lives} == {f"run-{TrackedRun(tmp_path / 'run', 'wandb').id}"}
    assert len(lives) == 3
