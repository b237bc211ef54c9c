"""One job at a time saves in a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager, Owner, SaveInfo, manager
from elastic_trainer.checkpoint.layout import OWNER_FILE, Kind, kind_of
from elastic_trainer.errors import StorageError

HOLDER = """
import sys
from elastic_trainer.checkpoint import CheckpointManager, Owner
checkpoints = CheckpointManager(sys.argv[1], owner=Owner(*(each or None for each in sys.argv[2:])))
checkpoints.check_writable()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another(directory: Path, run: str = "", job: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process of a job that holds ``directory``."""
    command = [sys.executable, "-c", HOLDER, str(directory), run, job]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "CLAIM_S", 0.2)


@pytest.mark.parametrize("mine", [Owner(), Owner("b"), Owner("b", "b"), Owner("a")])
def test_a_directory_that_a_living_process_of_another_job_saves_in_is_refused(tmp_path: Path, mine: Owner) -> None:
    """At the start and at each save, with the holder's name; an equal name proves nothing where no agent vouches for
    it. Nothing is written."""
    with another(tmp_path, "a") as holder:
        checkpoints = CheckpointManager(tmp_path, owner=mine)
        for attempt in (checkpoints.check_writable, lambda: checkpoints.save({"x": 1}, SaveInfo(1))):
            with pytest.raises(StorageError, match=rf"in use by run 'a' \(process {holder.pid} on "):
                attempt()
    assert CheckpointManager(tmp_path).entries() == ()


def test_a_job_that_is_gone_leaves_the_directory_to_others(tmp_path: Path) -> None:
    """However it ended: the kernel takes the lock back. One whose process lives on gives it back itself."""
    with another(tmp_path):
        pass
    first = CheckpointManager(tmp_path, owner=Owner("b"))
    first.check_writable()
    assert json.loads((tmp_path / OWNER_FILE).read_text())["run"] == "b"
    first.close()
    with another(tmp_path, "c"):
        pass


def test_a_process_of_the_same_job_does_not_wait_for_its_predecessor(tmp_path: Path) -> None:
    """In place another rank saves at once where the one before is frozen; it gets the lock when that one is gone."""
    checkpoints = CheckpointManager(tmp_path, owner=Owner("a", "a"))
    with another(tmp_path, "a", "a"):
        assert checkpoints.save({"x": 1}, SaveInfo(1)).entry.manifest.run == "a"
    checkpoints.save({"x": 2}, SaveInfo(2))
    with pytest.raises(AssertionError), another(tmp_path, "b"):
        pass


def test_who_reads_holds_nothing_and_is_kept_out_by_nobody(tmp_path: Path) -> None:
    """Commands and evaluations beside a training; the file of the lock is nobody's checkpoint."""
    assert kind_of(OWNER_FILE) is Kind.FOREIGN
    with another(tmp_path, "a"):
        assert CheckpointManager(tmp_path, owner=Owner("b")).newest() is None
        CheckpointManager(tmp_path).sweep()
