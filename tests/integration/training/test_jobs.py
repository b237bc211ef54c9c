"""Whole jobs on real digits: alone, with several ranks, resumed, and to the accuracy that they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_LEFT
from tests.integration.training.launch import LIMIT_S, QUICK, command, records, train
from tests.integration.worker.launch import environment
from tests.support.forked import Forked
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(900)


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
