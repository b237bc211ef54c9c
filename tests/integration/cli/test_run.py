"""``elastic-trainer run`` on a real etcd: a node that trains, in the process that was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.cli.main import main

JOB = """
import torch
from elastic_trainer import Session

with Session(checkpoint_dir="checkpoints", seed=1) as session:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = session.wrap(model, optimizer=optimizer)
    for batch in session.batches(torch.utils.data.TensorDataset(torch.ones(8, 1)), global_batch_size=4, epochs=1):
        with session.step() as step:
            step.backward(model(batch.x).mean())
            optimizer.step()
    print(f"the last step was {step.number}", flush=True)
"""


@pytest.mark.timeout(200)
def test_a_script_with_a_session_trains_in_place(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Its name and etcd are what was given; the exit code is torchrun's."""
    (tmp_path / "train.py").write_text(JOB)
    command = [sys.executable, "-m", "elastic_trainer", "run", "--endpoint", etcd_endpoint, "--name", run_id]
    done = subprocess.run(
        [*command, "--", "train.py"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "recovery=in_place train.py" in done.stderr
    assert "the last step was 2" in done.stdout


def test_completion_knows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """And their options."""
    assert main(["completion", "bash"]) == 0
    said = capsys.readouterr().out
    assert "checkpoints" in said
    assert "--kill-worker-at" in said
