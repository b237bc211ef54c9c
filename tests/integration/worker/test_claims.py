"""Jobs that are given one checkpoint directory, at the same time or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.errors import EXIT_CANNOT_WRITE, EXIT_CONFIG, EXIT_FAILURE
from elastic_trainer.local.ledger import LedgerTail, LineKind
from tests.integration.worker.launch import LIMIT_S, free_port, plain, run, standalone, started, torchrun
from tests.support.waiting import eventually

SLOW = ["100", "--save-every", "2", "--step-s", "0.1"]


def named(name: str, directory: Path, *arguments: str) -> Sequence[str]:
    options = ["--nnodes=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id={name}"]
    return torchrun([*options, "--local-addr=127.0.0.1"], "train.py", directory, *arguments)


def runs(directory: Path) -> set[str | None]:
    return {entry.manifest.run for entry in CheckpointManager(directory / "checkpoints").entries()}


def opened(directory: Path) -> list[int]:
    return [line.step for line in LedgerTail(directory / "ledger").read() if line.event is LineKind.OPENED]


def test_a_second_job_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    """Neither has a name, as two scripts on one machine: the sentence says which process saves there. The first one
    goes on; when it is killed, the next begins where it ended."""
    logs, extra = (tmp_path / "log-a", tmp_path / "log-b"), {"ELASTIC_TRAINER_LEDGER_DIR": str(tmp_path / "ledger")}
    with started(plain("train.py", tmp_path, *SLOW), logs[0], extra) as first:
        eventually(lambda: (tmp_path / "checkpoints").exists() and runs(tmp_path), logs[0].read_text, LIMIT_S)
        run(plain("train.py", tmp_path, *SLOW), logs[1], expected=EXIT_CANNOT_WRITE)
        assert f"in use by another job (process {first.pid} on " in logs[1].read_text()
        assert first.poll() is None
    run(standalone(1, "train.py", tmp_path, "1"), tmp_path / "log-c", extra)
    first_life, next_life = opened(tmp_path)
    assert first_life == 0
    assert next_life >= 2


def test_a_run_goes_on_with_its_own_checkpoints_only(tmp_path: Path) -> None:
    """Under its name it resumes; a run with another name, or with none, is refused before it begins, and told what to
    do to go on all the same."""
    log = tmp_path / "log"
    run(named("a", tmp_path, "1"), log)
    run(named("a", tmp_path, "2"), log)
    assert runs(tmp_path) == {"a"}
    for command, who, code in (
        (named("b", tmp_path, "3"), "is run 'b'", EXIT_FAILURE),  # torchrun's
        (plain("train.py", tmp_path, "3"), "without a name", EXIT_CONFIG),
    ):
        run(command, tmp_path / who, expected=code)
        said = (tmp_path / who).read_text()
        assert "was saved by run 'a', and this" in said
        assert who in said
        assert "allow_changed=['run']" in said
    assert runs(tmp_path) == {"a"}
    run(named("b", tmp_path, "3", "--allow-changed", "run"), log)
    assert "b" in runs(tmp_path)
