"""The manager: saving, finding, loading, falling back, refusing to forget."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import (
    BestMode,
    CheckpointManager,
    SaveInfo,
    Soundness,
    describe,
)
from elastic_trainer.checkpoint.manifest import FORMAT, MANIFEST_FILE, STATE_FILE, TENSORS_FILE, seal
from elastic_trainer.checkpoint.storage import PosixStorage, Sink
from elastic_trainer.checkpoint.storage.posix import writing
from elastic_trainer.errors import CheckpointError, StorageError
from tests.unit.checkpoint.states import Heard, flip_bit, load_newest, manager, newest_of, same, training_state

FILES = (MANIFEST_FILE, STATE_FILE, TENSORS_FILE)


def save(checkpoints: CheckpointManager, *steps: int, round_number: int = 0) -> list[str]:
    return [
        checkpoints.save({"step": step, "w": torch.full((4,), step)}, SaveInfo(step=step, round=round_number)).name
        for step in steps
    ]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """State and all that is known of it come back, also of one without tensors or anything; the directory is made."""
    checkpoints, heard = manager(tmp_path / "deep" / "er")
    info = SaveInfo(12, 3, 1, 640, 4, {"loss": 0.5}, True, {"seed": 7, "list": [1, {"a": None}]})
    state = training_state()
    done = checkpoints.save(state, info)
    loaded = newest_of(checkpoints)
    assert same(loaded.state, state)
    assert loaded.state["model"]._metadata == state["model"]._metadata  # the versions of its modules
    manifest = loaded.manifest
    assert (manifest.step, manifest.round, manifest.epoch, manifest.samples, manifest.world_size) == (12, 3, 1, 640, 4)
    assert (dict(manifest.metrics), manifest.best, manifest.fields) == ({"loss": 0.5}, True, dict(info.fields))
    assert manifest.versions["torch"] == torch.__version__
    assert (loaded.name, done.name) == (manifest.name, manifest.name)
    assert done.size == sum((done.entry.path / name).stat().st_size for name in (STATE_FILE, TENSORS_FILE))
    assert heard.kinds() == ["checkpoint.committed", "checkpoint.loaded"]
    assert sorted(os.listdir(done.entry.path)) == sorted(FILES)
    odd: list[dict[str, Any]] = [{}, {"a": 1}, {"empty": torch.empty(0)}]
    for step, state in enumerate(odd, 13):
        checkpoints.save(state, SaveInfo(step, 3))
        assert same(newest_of(checkpoints).state, state)


def test_newest_is_the_highest_round_then_step(tmp_path: Path) -> None:
    """A stale writer that is ahead in steps does not win; a save that is outranked is reported."""
    checkpoints, heard = manager(tmp_path)
    (new,) = save(checkpoints, 400, round_number=2)
    (stale,) = save(checkpoints, 500, round_number=1)
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.name, newest.step, newest.round) == (new, 400, 2)
    assert [event.name for event in heard if event.kind == "checkpoint.outranked"] == [stale]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    for directory in (tmp_path / "foreign", tmp_path / "missing"):
        checkpoints, _ = manager(directory)
        assert load_newest(checkpoints) is None
        assert checkpoints.newest() is None
        assert checkpoints.best() is None
        assert describe(directory) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def middle_bit(path: Path) -> None:
    flip_bit(path, path.stat().st_size * 4)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [truncate, extend, middle_bit, Path.unlink], ids=lambda harm: str(harm.__name__))
def test_a_damaged_checkpoint_is_quarantined_and_the_previous_one_taken(
    tmp_path: Path, file: str, harm: Callable[[Path], None]
) -> None:
    """Whatever happened to whichever file: renamed, never deleted, reported, and the one before is loaded."""
    checkpoints, heard = manager(tmp_path)
    good, bad = save(checkpoints, 1, 2)
    harm(tmp_path / bad / file)
    content = {path.name: path.read_bytes() for path in (tmp_path / bad).iterdir()}
    fresh, heard = manager(tmp_path)
    loaded = newest_of(fresh)
    assert (loaded.name, loaded.state["step"]) == (good, 1)
    moved = file != MANIFEST_FILE  # one without a good manifest is passed over where it is
    assert heard.kinds() == ["checkpoint.quarantined" if moved else "checkpoint.skipped", "checkpoint.loaded"]
    assert heard[0].name == bad
    (now,) = set(os.listdir(tmp_path)) - {good}
    assert now == (f"corrupt-{bad}-1" if moved else bad)
    assert {path.name: path.read_bytes() for path in (tmp_path / now).iterdir()} == content
    assert {each.status for each in describe(tmp_path)} == {
        Soundness.VERIFIED, Soundness.QUARANTINED if moved else Soundness.DAMAGED,
    }  # fmt: skip


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    """A checkpoint that was put back and is damaged again gets the next number."""
    checkpoints, _ = manager(tmp_path)
    _, bad = save(checkpoints, 1, 2)
    for number in (1, 2, 3):
        (tmp_path / bad / STATE_FILE).write_text("garbage")
        load_newest(checkpoints)
        shutil.copytree(tmp_path / f"corrupt-{bad}-{number}", tmp_path / bad)
    assert {f"corrupt-{bad}-{number}" for number in (1, 2, 3)} < set(os.listdir(tmp_path))


def test_if_all_are_bad_nobody_starts_from_scratch(tmp_path: Path) -> None:
    """The error names the directory; it comes again after everything was quarantined, from newest() too."""
    checkpoints, _ = manager(tmp_path)
    names = save(checkpoints, 1, 2)
    for name in names:
        truncate(tmp_path / name / TENSORS_FILE)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="start from scratch") as caught:
            load_newest(manager(tmp_path)[0])
        assert str(tmp_path) in str(caught.value)
        assert all(name in str(caught.value) for name in names)
    with pytest.raises(CheckpointError, match="start from scratch"):
        manager(tmp_path)[0].newest()


def test_newest_passes_over_a_bad_manifest_and_reports_it_once(tmp_path: Path) -> None:
    """newest() moves nothing; the report does not repeat with every save."""
    checkpoints, _ = manager(tmp_path)
    good, bad = save(checkpoints, 1, 2)
    truncate(tmp_path / bad / MANIFEST_FILE)
    fresh, heard = manager(tmp_path)
    for _ in range(3):
        newest = fresh.newest()
        assert newest is not None
        assert newest.name == good
    assert heard.kinds() == ["checkpoint.skipped"]
    assert (tmp_path / bad).exists()


def test_a_checkpoint_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    """It is skipped with a report, never quarantined; alone it is an error with the way out."""
    checkpoints, _ = manager(tmp_path)
    good, future = save(checkpoints, 1, 2)
    entry = checkpoints.newest()
    assert entry is not None
    later = entry.manifest.model_copy(update={"format": FORMAT + 1})
    (tmp_path / future / MANIFEST_FILE).write_bytes(seal(later))
    fresh, heard = manager(tmp_path)
    loaded = newest_of(fresh)
    assert loaded.name == good
    assert heard.kinds() == ["checkpoint.skipped", "checkpoint.loaded"]
    assert (tmp_path / future).exists()
    assert [each.status for each in describe(tmp_path)] == [Soundness.UNREADABLE, Soundness.VERIFIED]


class Vanishing(PosixStorage):
    """Another process's retention removes a checkpoint, and commits another, just before it is opened."""

    def __init__(self, root: Path, victim: str, before: str, then: Callable[[], object]) -> None:
        super().__init__(root)
        self.victim, self.before, self.then = victim, before, then

    def source(self, name: str, file: str):  # type: ignore[no-untyped-def]
        if (name, file) == (self.victim, self.before):
            self.remove(name)
            self.then()
        return super().source(name, file)


@pytest.mark.parametrize("before", FILES)
def test_a_checkpoint_that_vanishes_while_it_is_read_is_passed_over(tmp_path: Path, before: str) -> None:
    """Gone is not damaged: no quarantine, no report of damage, the next one is loaded."""
    checkpoints, _ = manager(tmp_path)
    older, newest = save(checkpoints, 1, 2)
    heard = Heard()
    racing = CheckpointManager(tmp_path, None, heard.append, storage=Vanishing(tmp_path, newest, before, lambda: 0))
    loaded = newest_of(racing)
    assert loaded.name == older
    assert heard.kinds() == ["checkpoint.loaded"]
    assert os.listdir(tmp_path) == [older]


def test_if_the_only_one_was_replaced_meanwhile_the_new_one_is_found(tmp_path: Path) -> None:
    """Between listing and reading everything may change; neither None nor an error comes of it."""
    for find in (load_newest, CheckpointManager.newest):
        directory = tmp_path / find.__name__
        checkpoints, _ = manager(directory)
        (only,) = save(checkpoints, 1)
        storage = Vanishing(directory, only, MANIFEST_FILE, partial(save, checkpoints, 2))
        found: Any = find(CheckpointManager(directory, storage=storage))
        assert found is not None
        assert found.name == str(next(iter(os.listdir(directory))))


def test_best_by_metric_and_by_flag(tmp_path: Path) -> None:
    """With a metric the best value counts; without one the newest that was saved as best."""
    ranked, _ = manager(tmp_path / "metric", metric="accuracy", mode=BestMode.MAX)
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7)):
        ranked.save({}, SaveInfo(step, metrics={"accuracy": value}))
    flagged, _ = manager(tmp_path / "flag")
    for step, best in ((1, True), (2, True), (3, False)):
        flagged.save({}, SaveInfo(step, best=best))
    for checkpoints in (ranked, flagged):
        found = checkpoints.best()
        assert found is not None
        assert found.step == 2


def test_retention_runs_after_the_commit_and_reports(tmp_path: Path) -> None:
    """The newest, the milestones and the best stay; each removal is an event with its reason."""
    checkpoints, heard = manager(tmp_path, keep_last=2, keep_every=4, metric="loss")
    for step in range(1, 11):
        checkpoints.save({}, SaveInfo(step, metrics={"loss": abs(step - 3.0)}))
    assert [entry.step for entry in checkpoints.entries()] == [10, 9, 8, 4, 3]
    removed = [event for event in heard if event.kind == "checkpoint.removed"]
    assert len(removed) == 5
    assert all(event.reason for event in removed)
    assert len(os.listdir(tmp_path)) == 5


def test_retention_of_a_fresh_manager_sees_older_checkpoints(tmp_path: Path) -> None:
    """A restarted job goes on tidying what the one before has saved, but never its own outranked save."""
    save(manager(tmp_path)[0], *range(5), round_number=3)
    (outranked,) = save(manager(tmp_path, keep_last=1)[0], 2, round_number=1)
    left = manager(tmp_path)[0].entries()
    assert [(entry.round, entry.step) for entry in left] == [(3, 4), (1, 2)]
    assert left[1].name == outranked


class Failing(PosixStorage):
    """Fails the ``at``-th write with ``number``; reports as much space as one likes."""

    def __init__(self, root: Path, number: int, at: int, free: int | None = None) -> None:
        super().__init__(root)
        self.number, self.left, self.free = number, at, free

    def free_bytes(self) -> int | None:
        return self.free

    def sink(self, name: str, file: str) -> Sink:
        inner = super().sink(name, file)
        write = inner.write

        def failing(data: memoryview) -> None:
            self.left -= 1
            if self.left < 0:
                with writing(self.location):
                    raise OSError(self.number, os.strerror(self.number))
            write(data)

        inner.write = failing  # type: ignore[method-assign]
        return inner


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"),
        (errno.EIO, "input/output error"), (errno.ENOTSUP, "cannot be written"),
    ],
)  # fmt: skip
def test_a_failing_disk_costs_nothing_but_the_save(tmp_path: Path, number: int, words: str, at: int) -> None:
    """Whichever write fails, the error says why and where; nothing partial stays, earlier checkpoints are intact."""
    save(manager(tmp_path)[0], 1)
    before = sorted(os.listdir(tmp_path))
    failing = CheckpointManager(tmp_path, storage=Failing(tmp_path, number, at))
    with pytest.raises(StorageError, match=words) as caught:
        save(failing, 2)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 73
    assert sorted(os.listdir(tmp_path)) == before
    loaded = newest_of(manager(tmp_path)[0])
    assert loaded.state["step"] == 1


def test_nothing_partial_is_left(tmp_path: Path) -> None:
    """By an interrupt; where space is lacking, which is found before anything is written; of what cannot be saved."""

    class Interrupting(PosixStorage):
        def publish(self, temporary: str, name: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(CheckpointManager(tmp_path, storage=Interrupting(tmp_path)), 1)
    small = Failing(tmp_path, errno.EIO, at=0, free=1000)
    with pytest.raises(StorageError, match=r"is full.*needs.*are free"):
        save(CheckpointManager(tmp_path, storage=small), 1)
    checkpoints, _ = manager(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\['bad'\]"):
        checkpoints.save({"bad": object()}, SaveInfo(1))
    with pytest.raises(CheckpointError, match="'odd'"):
        checkpoints.save({}, SaveInfo(1, fields={"odd": object()}))
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_the_directory_is_one_clear_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    checkpoints, _ = manager(path)
    acts: list[Callable[[], object]] = [
        checkpoints.check_writable, lambda: save(checkpoints, 1), lambda: load_newest(checkpoints), checkpoints.newest,
        lambda: describe(path),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(CheckpointError, match=f"{path} is not a directory"):
            act()
    assert path.read_text() == "mine"


def test_the_package_lists_and_verifies_without_torch(tmp_path: Path) -> None:
    """An agent or the command line can find, verify and describe checkpoints without paying for torch."""
    save(manager(tmp_path)[0], 1)
    script = (
        "import sys, elastic_trainer.checkpoint as c\n"
        "found = c.describe(sys.argv[1])\n"
        "assert [each.status for each in found] == ['verified'], found\n"
        "assert c.CheckpointManager(sys.argv[1]).newest().step == 1\n"
        "c.CheckpointManager(sys.argv[1]).save({'plain': [1, 2.5, b'x']}, c.SaveInfo(2))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    loaded = newest_of(manager(tmp_path)[0])
    assert loaded.state == {"plain": [1, 2.5, b"x"]}


@pytest.mark.gpu
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    """Values and sharing survive; where they lay is not kept."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    weight = torch.randn(1000, 100, device="cuda")
    checkpoints, _ = manager(tmp_path)
    checkpoints.save({"w": weight, "tied": weight, "t": weight.t(), "h": weight.to(torch.bfloat16)}, SaveInfo(1))
    loaded = newest_of(checkpoints)
    assert loaded.state["w"] is loaded.state["tied"]
    assert torch.equal(loaded.state["w"], weight.cpu())
    assert torch.equal(loaded.state["t"], weight.t().cpu())
    assert torch.equal(loaded.state["h"], weight.to(torch.bfloat16).cpu())
