"""Full, read-only and forbidden directories: a clear error, and every earlier checkpoint intact."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, Event, Owner, SaveInfo, Soundness, Transition, describe
from elastic_trainer.checkpoint.manifest import TENSORS_FILE, temporary_name
from elastic_trainer.checkpoint.storage import PosixStorage
from elastic_trainer.cli.main import main as command
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.worker.session import Session
from tests.drills.checkpoint.remote_job import train
from tests.support.small_disk import fill, mounted, run
from tests.unit.checkpoint.states import Heard, flip_bit, load_newest, newest_of
from tests.unit.checkpoint.test_commit import dead_process

MB = 1 << 20
SMALL_DISK = 32 * MB


def state(megabytes: int, value: int = 1) -> dict[str, torch.Tensor]:
    return {"w": torch.full((megabytes * MB,), value, dtype=torch.uint8)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", SMALL_DISK) as path:
        yield path


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write everywhere, so be nobody for a while; an ordinary user stays who he is."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


class Boundless(PosixStorage):
    """Does not know how much space is left, as some network file systems do not."""

    def free_bytes(self) -> int | None:
        return None


def intact(directory: Path, value: int) -> bool:
    loaded = load_newest(CheckpointManager(directory))
    return loaded is not None and bool((loaded.state["w"] == value).all())


@pytest.mark.root
@pytest.mark.parametrize("storage", [PosixStorage, Boundless], ids=["checked first", "found out while writing"])
def test_a_full_disk_loses_nothing(small_disk: Path, storage: type[PosixStorage]) -> None:
    directory = small_disk / "checkpoints"
    checkpoints = CheckpointManager(directory, storage=storage(directory))
    first = checkpoints.save(state(10), SaveInfo(1)).name
    for _ in range(3):
        with pytest.raises(StorageError, match="is full") as caught:
            checkpoints.save(state(25, 2), SaveInfo(2))
        assert str(directory) in str(caught.value)
        assert os.listdir(directory) == [first]
    assert intact(directory, 1)
    checkpoints.save(state(10, 3), SaveInfo(3))
    assert intact(directory, 3)


@pytest.mark.root
def test_what_a_dead_writer_left_does_not_keep_a_job_from_starting(small_disk: Path) -> None:
    """It fills the disk to the last byte: it is swept before the check, and before the claim that a save writes."""
    directory, owner = small_disk / "checkpoints", Owner("run")
    for start in (CheckpointManager.check_writable, lambda manager: manager.save(state(15), SaveInfo(1))):
        abandoned = directory / temporary_name(dead_process())
        abandoned.mkdir(parents=True)
        fill(abandoned, but_bytes=0)
        manager = CheckpointManager(directory, on_event=(heard := Heard()).append, owner=owner)
        start(manager)
        manager.close()
        assert not abandoned.exists()
        assert heard.kinds()[0] == "checkpoint.swept"
    assert intact(directory, 1)


@pytest.mark.root
def test_a_disk_without_any_space_is_found_at_the_start(small_disk: Path) -> None:
    fill(small_disk, but_bytes=MB)
    with pytest.raises(StorageError, match="is full"):
        CheckpointManager(small_disk / "checkpoints").check_writable()


@pytest.mark.root
def test_a_read_only_file_system_can_be_loaded_from(small_disk: Path) -> None:
    """Writing is a clear error; loading works, and a damaged checkpoint is skipped since it cannot be renamed."""
    checkpoints = CheckpointManager(small_disk)
    checkpoints.save(state(1, 1), SaveInfo(1))
    bad = checkpoints.save(state(1, 2), SaveInfo(2)).name
    flip_bit(small_disk / bad / TENSORS_FILE, 100_000)
    run("mount", "-o", "remount,ro", str(small_disk))
    heard = Heard()
    reading = CheckpointManager(small_disk, on_event=heard.append)
    for act in (reading.check_writable, lambda: reading.save(state(1), SaveInfo(3))):
        with pytest.raises(StorageError, match="read-only"):
            act()
    assert reading.sweep() == 0
    loaded = newest_of(reading)
    assert loaded.manifest.step == 1
    assert heard.kinds() == ["checkpoint.failed", "checkpoint.skipped", "checkpoint.loaded"]
    assert "cannot be renamed" in heard[1].reason
    assert [each.status for each in describe(small_disk)] == [Soundness.DAMAGED, Soundness.VERIFIED]


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users can reach (pytest's own they cannot)."""
    with tempfile.TemporaryDirectory() as text:
        path = Path(text)
        path.chmod(0o755)
        yield path


def test_a_directory_of_somebody_else_is_found_at_the_start(reachable: Path) -> None:
    CheckpointManager(reachable).save(state(1), SaveInfo(1))
    reachable.chmod(0o555)
    checkpoints = CheckpointManager(reachable)
    with unprivileged():
        for act in (checkpoints.check_writable, lambda: checkpoints.save(state(1), SaveInfo(2))):
            with pytest.raises(StorageError, match="permission denied") as caught:
                act()
            assert str(reachable) in str(caught.value)
        assert intact(reachable, 1)
    reachable.chmod(0o755)


def test_unreadable_files_are_skipped_and_an_unreadable_directory_is_an_error(reachable: Path) -> None:
    """No permission to read is no damage: nothing is renamed, and nobody starts from scratch."""
    checkpoints = CheckpointManager(reachable)
    checkpoints.save(state(1, 1), SaveInfo(1))
    secret = checkpoints.save(state(1, 2), SaveInfo(2)).entry.path / TENSORS_FILE
    secret.chmod(0)
    heard = Heard()
    reading = CheckpointManager(reachable, on_event=heard.append)
    with unprivileged():
        loaded = newest_of(reading)
    assert loaded.manifest.step == 1
    assert heard.kinds() == ["checkpoint.skipped", "checkpoint.loaded"]
    reachable.chmod(0)
    with unprivileged(), pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_newest(reading)
    assert str(reachable) in str(caught.value)
    reachable.chmod(0o755)


@pytest.mark.parametrize("fault", ["permission", "vanished"])
def test_a_directory_that_fails_in_mid_run_costs_a_save_at_most(fault: str) -> None:
    """Permission is lost and comes back, or the directory goes: training goes on as without, failures are events, the
    next save works, and the directory is still this job's."""
    reference = train(None, 24, 4)[1]
    events: list[Event] = []
    with unprivileged(), tempfile.TemporaryDirectory() as top:
        directory = Path(top, "checkpoints")

        def seen(kind: Transition, step: int) -> bool:
            return any(event.kind is kind and event.values["step"] == step for event in events)

        def until(kind: Transition, step: int) -> None:
            patience = Deadline.after(60.0)
            while not seen(kind, step):
                assert not patience.expired, f"no {kind} of step {step}: {events}"
                pause(0.02)

        def after(session: Session, step: int) -> None:
            if step == 6:
                until(Transition.COMMITTED, 4)
                if fault == "permission":
                    directory.chmod(0o500)
                else:
                    shutil.rmtree(directory)
            if step == 10 and fault == "permission":
                until(Transition.FAILED, 8)
                directory.chmod(0o700)
            if step == 14:
                until(Transition.COMMITTED, 12)
                script = "import sys; from elastic_trainer.checkpoint import CheckpointManager, Owner, manager;"
                script += "manager.CLAIM_S = 0; CheckpointManager(sys.argv[1], owner=Owner()).check_writable()"
                me = os.geteuid()
                os.seteuid(os.getuid())  # nobody may not start the interpreter
                refused = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True)
                os.seteuid(me)
                assert "is in use by another job" in refused.stderr

        done, parameters = train(str(directory), 24, 4, after, events.append)
        saved = [entry.step for entry in CheckpointManager(directory).entries()]
    assert done == list(range(1, 25))
    assert torch.equal(parameters, reference)
    assert saved == ([24, 20, 16, 12, 4] if fault == "permission" else [24, 20, 16, 12, 8])
    assert seen(Transition.FAILED, 8) is (fault == "permission")


@pytest.mark.root
@pytest.mark.parametrize("target", ["safetensors", "torch", "huggingface"])
def test_an_export_to_a_full_disk_is_one_sentence(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 73, and nothing is left there; an import there says so too."""
    CheckpointManager(tmp_path / "run").save({"model": {"w": torch.randn(1000, 1000)}}, SaveInfo(1))
    theirs = tmp_path / "theirs.pt"
    torch.save({"w": torch.randn(1000, 1000)}, theirs)
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        capsys.readouterr()
        assert command(["checkpoints", "export", str(tmp_path / "run"), str(disk / "goal"), "--to", target]) == 73
        error = capsys.readouterr().err
        assert f"{disk}/goal cannot be written: No space left on device" in error
        assert error.count("elastic-trainer: ") == 1
        assert list(disk.iterdir()) == []
        assert command(["checkpoints", "import", str(theirs), "--into", str(disk)]) == 73
        assert list(disk.iterdir()) == []
