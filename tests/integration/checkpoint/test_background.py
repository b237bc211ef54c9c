"""Saves beside training: real threads, real directories."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import Arena, BackgroundSaves, CheckpointManager, Committed, Retention, SaveInfo
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.manifest import Image, Manifest
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.errors import NonFiniteError, StorageError
from tests.unit.checkpoint.states import Place, newest_of
from tests.unit.checkpoint.test_memory import Stream, on_device

LIMIT_S = 30.0


class Gated(CheckpointManager):
    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, Retention(keep_last=100), **options)
        self.gate, self.began = threading.Semaphore(0), threading.Semaphore(0)
        self.full: set[int] = set()

    def commit(self, image: Image, draft: Manifest, stop: threading.Event | None = None) -> Committed:
        self.began.release()
        assert self.gate.acquire(timeout=LIMIT_S)
        if draft.step in self.full:
            raise StorageError(f"step {draft.step}: full")
        return super().commit(image, draft, stop)


def submit(saves: BackgroundSaves, manager: CheckpointManager, weights: torch.Tensor, step: int) -> Any:
    info = SaveInfo(step)
    return saves.submit(manager.encode({"w": weights, "step": step}, info), manager.draft(info))


def test_a_third_snapshot_waits_for_a_slot_or_takes_that_of_the_second(tmp_path: Path) -> None:
    manager = Gated(tmp_path)
    saves, weights = BackgroundSaves(manager), torch.zeros(10)
    for step in (1, 2):
        submit(saves, manager, weights, step)
    assert manager.began.acquire(timeout=LIMIT_S)
    given_up = saves.give_up_waiting()
    assert given_up is not None
    assert given_up.manifest.step == 2
    assert saves.give_up_waiting() is None
    submit(saves, manager, weights, 3)
    third = threading.Thread(target=submit, args=(saves, manager, weights, 4))
    third.start()
    third.join(0.1)
    assert third.is_alive()
    manager.gate.release(3)
    third.join(LIMIT_S)
    saves.close()
    assert [entry.step for entry in manager.entries()] == [4, 3, 1]


def test_closing_writes_what_waits_unless_that_takes_too_long(tmp_path: Path) -> None:
    """What was cut short is not a checkpoint."""
    manager = Gated(tmp_path)
    saves = BackgroundSaves(manager)
    for step in (1, 2):
        submit(saves, manager, torch.zeros(10), step)
    saves.close(0.05)
    assert manager.entries() == ()
    manager.gate.release(2)
    for _ in range(2):
        saves.close()
    assert [entry.step for entry in manager.entries()] == [2, 1]


def test_without_memory_a_save_is_made_at_once_behind_the_one_under_way(tmp_path: Path) -> None:
    manager = Gated(tmp_path)
    saves, weights, info = BackgroundSaves(manager), torch.zeros(10), SaveInfo(2)
    submit(saves, manager, weights, 1)
    manager.gate.release(2)
    done = saves.at_once(manager.encode({"w": weights}, info), manager.draft(info))
    assert done.done.is_set()
    assert [save.manifest.step for save in saves.finished()] == [1, 2]
    saves.close()


@pytest.fixture
def lasting() -> Iterator[Arena]:
    files = [os.memfd_create(f"test-{number}") for number in range(SLOTS)]
    yield Arena([Path(f"/proc/self/fd/{each}") for each in files])
    for each in files:
        os.close(each)


def keep(saves: BackgroundSaves, manager: CheckpointManager, weights: torch.Tensor, step: int) -> None:
    info = SaveInfo(step)
    image = manager.encode({"w": weights}, info, watched={"w": weights})
    saves.submit(image, manager.draft(info), SnapshotPurpose.MEMORY_ONLY)


def test_states_that_are_refused_leave_the_newest_good_one_in_memory(tmp_path: Path, lasting: Arena) -> None:
    manager = CheckpointManager(tmp_path)
    saves = BackgroundSaves(manager, lasting)
    for step, value in enumerate((1.0, 2.0, math.nan, math.nan, math.nan), 1):
        keep(saves, manager, torch.full((1000,), value), step)
        saves.wait()
    assert kept_step(lasting) == 2
    assert len(saves.finished()) == 3
    saves.close()


def kept_step(arena: Arena) -> int:
    found = arena.newest()
    assert found is not None
    return found.manifest.step


class SlowToSeal(CheckpointManager):
    """Its snapshots are sealed one by one, when the test says so."""

    gate = threading.Semaphore(1)

    @property
    def location(self) -> str:
        assert self.gate.acquire(timeout=LIMIT_S)
        return super().location


def test_a_copy_is_sealed_before_the_one_before_it_is_given_up(tmp_path: Path, lasting: Arena) -> None:
    """At every moment, memory that outlives the process holds a whole state."""
    manager = SlowToSeal(tmp_path)
    saves = BackgroundSaves(manager, lasting)
    keep(saves, manager, torch.ones(1000), 1)
    saves.wait()
    keep(saves, manager, torch.ones(1000), 2)
    third = threading.Thread(target=keep, args=(saves, manager, torch.ones(1000), 3))
    third.start()
    third.join(0.2)
    assert kept_step(lasting) == 1
    assert (third.is_alive(), saves.sealing) == (True, True)
    manager.gate.release(2)
    third.join(LIMIT_S)
    saves.wait()
    assert kept_step(lasting) == 3
    saves.close()


def test_a_process_that_ends_can_still_commit(tmp_path: Path) -> None:
    """An agent that leaves commits what it holds, when no thread pool takes anything any more."""
    program = f"""
import atexit, torch
from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
state = {{"w": torch.arange(6_000_000.0)}}
atexit.register(lambda: CheckpointManager({str(tmp_path)!r}).save(state, SaveInfo(1)))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert torch.equal(newest_of(CheckpointManager(tmp_path)).state["w"], torch.arange(6_000_000.0))


def test_a_copy_from_a_device_is_sealed_when_it_has_arrived(tmp_path: Path) -> None:
    """The thread that trains does not wait for it; the one that seals does, before it looks at the bytes."""
    manager = CheckpointManager(tmp_path)
    saves = BackgroundSaves(manager, Arena(cuda=Stream()))
    for step in (1, 2, 3):
        state = {"w": torch.full((50_000,), float(step))}
        save = saves.submit(on_device(manager.encode(state, SaveInfo(step))), manager.draft(SaveInfo(step)))
        saves.wait()
        assert save.committed is not None
        assert torch.equal(manager.load(save.committed.entry).state["w"], state["w"])
    saves.close()


def place_saves(directory: Path, index: int, value: float, purpose: SnapshotPurpose) -> tuple[BackgroundSaves, Any]:
    """The save of one place, which has tensors of its own."""
    manager, info, weight = CheckpointManager(directory), SaveInfo(3), torch.full((10,), value)
    saves = BackgroundSaves(manager)
    image = manager.encode({f"w{index}": weight}, info, watched={"w": weight}, places=Place(index))
    return saves, saves.submit(image, manager.draft(info), purpose)


def test_a_place_whose_shard_is_not_finite_ends_the_save_of_all(tmp_path: Path) -> None:
    """Place 0 learns it at once, and does not wait for a file that cannot come."""
    first, save = place_saves(tmp_path, 0, 1.0, SnapshotPurpose.COMMIT)
    other, help_ = place_saves(tmp_path, 1, math.nan, SnapshotPurpose.CO_WRITE)
    assert save.done.wait(LIMIT_S)
    assert help_.done.wait(LIMIT_S)
    assert isinstance(help_.error, NonFiniteError)
    assert isinstance(save.error, StorageError)
    assert "place 1 could not write its shards" in str(save.error)
    first.close()
    other.close()
    assert CheckpointManager(tmp_path).entries() == ()


def test_nobody_waits_for_a_place_that_is_known_to_be_gone(tmp_path: Path) -> None:
    """Neither place 0 for another, nor another for place 0."""
    first, save = place_saves(tmp_path, 0, 1.0, SnapshotPurpose.COMMIT)
    first.stop(but=[(0, 3)])
    assert first.moments() == ((0, 3),)
    assert not save.done.wait(0.3)
    first.stop()
    assert save.done.wait(LIMIT_S)
    assert "place 1 did not come" in str(save.error)
    other, help_ = place_saves(tmp_path, 1, 1.0, SnapshotPurpose.CO_WRITE)
    assert not help_.done.wait(0.3)
    other.stop(but=[(0, 2)])
    assert help_.done.wait(LIMIT_S)
    assert help_.error is None
    first.close()
    other.close()
