"""What a user does wrong ends with one line and the right exit code, before any rank waits for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CANNOT_WRITE, EXIT_CONFIG
from elastic_trainer.jobs.config import load_job
from tests.integration.training.launch import QUICK, train

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.yaml"], "error: absent.yaml: there is no such file"),
        (["mnist", "epochz=3"], "error: command line: unknown key 'epochz' (did you mean 'epochs'?)"),
        (["mnist", "precision=fp16", "device=cpu"], "error: precision fp16 needs a CUDA device"),
        (["mnist", "checkpoint.metric=acuracy"], "error: checkpoint.metric is 'acuracy'"),
        (["mnist", "--fast"], "error: unrecognized arguments: --fast"),
        ([], "error: no job was given"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_78(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    """Nothing else is on standard error, no traceback least of all, and nothing on standard output."""
    outcome = train(*arguments, cwd=tmp_path)
    assert outcome.code == EXIT_CONFIG
    assert outcome.err.startswith(sentence)
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_a_directory_that_cannot_be_written_has_its_own_exit_code(tmp_path: Path) -> None:
    """It is found before training, not at the first checkpoint."""
    (tmp_path / "file").write_text("in the way")
    outcome = train("mnist", *QUICK, f"checkpoint.directory={tmp_path / 'file' / 'run'}")
    assert outcome.code == EXIT_CANNOT_WRITE
    assert outcome.err.startswith("error: ")
    assert "cannot be written" in outcome.err
    assert outcome.err.count("\n") == 1


def test_of_several_ranks_one_speaks(tmp_path: Path) -> None:
    """Under torchrun all ranks find the mistake by themselves, and one of them tells it; no group is formed."""
    outcome = train("mnist", "data.shfit=1", f"checkpoint.directory={tmp_path}", world=2)
    assert outcome.code != 0
    assert outcome.complaints == ["error: task mnist: unknown key 'data.shfit' (did you mean 'shift'?)"]
    assert outcome.events("session.opened") == []


def test_another_global_batch_on_resuming_is_refused_or_accepted_on_request(tmp_path: Path) -> None:
    """A run cannot change its order of samples by accident, and what was refused does not become its config.yaml."""
    where = f"checkpoint.directory={tmp_path}"
    assert train("mnist", *QUICK, where, "max_steps=3").code == 0
    refused = train("mnist", *QUICK, where, "global_batch=50")
    assert refused.code == EXIT_CONFIG
    assert "global_batch" in refused.complaints[0]
    assert load_job(str(tmp_path / "config.yaml")).global_batch == 25
    accepted = train("mnist", *QUICK, where, "global_batch=50", "--allow-changed", "global_batch")
    assert accepted.code == 0, accepted.err
    assert accepted.report["epoch"] == 2
    assert load_job(str(tmp_path / "config.yaml")).global_batch == 50


def test_the_effective_configuration_can_be_printed(tmp_path: Path) -> None:
    """It shows defaults and overrides, and is itself a job file; nothing is trained. Help says how to start."""
    shown = train("--help")
    assert shown.code == 0
    assert all(part in shown.out for part in ("torchrun --standalone", "key=value", "78"))
    printed = train("mnist", "--print-config", "epochs=3", "data.shift=1", cwd=tmp_path)
    assert printed.code == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "job.yaml").write_text(printed.out)
    again = train("job.yaml", "--print-config", cwd=tmp_path)
    assert again.out == printed.out
    assert "shift: 1" in again.out
