"""Real trackers, offline, through a killed rank 0 and a life that falls back to a checkpoint: one run, rising steps."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.jobs.loggers import TrackedRun
from tests.drills.inplace.leading import leading
from tests.integration.training.launch import ran
from tests.support.requirements import missing

READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data):  # LevelDB's log format: a header, then pieces of records in blocks of 32 KiB
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4) and place <= len(data):  # whole, or its last piece; a kill may leave less
            yield record
            record = b""

for path in sys.argv[1:]:
    items = [item for each in records(Path(path).read_bytes()) for item in Record.FromString(each).history.item]
    print(json.dumps([json.loads(item.value_json) for item in items if "train/step" in (item.key, *item.nested_key)]))
"""
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


def told(script: str, directory: Path, *arguments: str) -> list[Any]:
    """What a reader of a tracker's files says, a line each."""
    (directory / "read.py").write_text(script)
    done = ran([str(directory / "read.py"), *arguments], cwd=directory)
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("[")]


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
    losses, errors, runs = told(READ_MLFLOW, tmp_path)
    assert losses == [*range(1, 13)]
    assert errors == [12]
    assert runs == [["FINISHED", {"lr": "0.1"}]]
    lives = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert {path.stem for path in lives} == {f"run-{TrackedRun(tmp_path / 'run', 'wandb').id}"}
    parts = told(READ_WANDB, tmp_path, *map(str, lives))
    assert len(parts) == 3
    steps = [step for part in parts for step in part]
    assert all(before < after for before, after in pairwise(steps)), parts
    assert parts[-1] == [9, 10, 11, 12]
