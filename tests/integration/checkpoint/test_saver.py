"""Saves beside training: real threads, real directories; what a training does while storage is behind, and with saves
that fail behind its back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from elastic_trainer.checkpoint import (
    Arena,
    BackgroundSaves,
    CheckpointManager,
    Committed,
    Retention,
    SaveInfo,
    ShardGroup,
)
from elastic_trainer.checkpoint import memory as arena
from elastic_trainer.checkpoint.background import SnapshotPurpose
from elastic_trainer.checkpoint.commit import SHARDS_LEAST_PATIENCE_S
from elastic_trainer.checkpoint.manifest import Image, Manifest
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import NonFiniteError, RoundBrokenError, StorageError
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm import control as waiting
from elastic_trainer.worker.comm.control import Control, InterruptibleWaits
from elastic_trainer.worker.comm.lasting import ShardLayout
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import StoredStates, restore
from elastic_trainer.worker.state.saver import Cadence, Memory, Saver, ShardPart, WhenBehind, check_storage
from elastic_trainer.worker.state.training_state import Position, TrainingState
from tests.support.memory_store import ManualClock
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import GroupRank, newest_of
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
    assert [save.manifest.step for save in saves.take_ended()] == [1, 2]
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
    assert len(saves.take_ended()) == 3
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
    """The save of one rank, which has tensors of its own."""
    manager, info, weight = CheckpointManager(directory), SaveInfo(3), torch.full((10,), value)
    saves = BackgroundSaves(manager)
    image = manager.encode({f"w{index}": weight}, info, watched={"w": weight}, shard_group=GroupRank(index))
    return saves, saves.submit(image, manager.draft(info), purpose)


def test_a_place_whose_shard_is_not_finite_ends_the_save_of_all(tmp_path: Path) -> None:
    """Shard rank 0 learns it at once, and does not wait for a file that cannot come."""
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
    """Neither shard rank 0 for another, nor another for shard rank 0."""
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


# ---- the saver of a training


class Trained:
    """A model whose weights hold its step number, saved to storage that takes as long as the test wants."""

    def __init__(
        self,
        directory: Path,
        when_behind: WhenBehind = WhenBehind.WAIT,
        cadence: Cadence = Cadence(every_steps=1),  # noqa: B008 - frozen
        clock: Clock = SYSTEM,
        memory: Memory = Memory(),  # noqa: B008 - frozen
    ) -> None:
        self.manager, self.tracker = Gated(directory), HeartbeatReporter()
        self.module = torch.nn.Linear(100, 100)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.position = Position(cursor=Cursor())
        device = torch.device("cpu")
        state = TrainingState(self.module, optimizer, None, None, self.position, {}, {}, device)
        self.saver = Saver(
            self.manager, cadence, state, dict, lambda done: None, self.tracker, when_behind, memory, clock
        )
        self.saver.serve(saves=True)

    def step(self, value: float | None = None) -> None:
        self.position.step += 1
        with torch.no_grad():
            self.module.weight.fill_(self.position.step if value is None else value)

    def counted(self, name: str) -> float:
        return self.tracker._counts.get(name, 0.0)

    def end(self) -> list[int]:
        """The steps whose checkpoints are there, oldest first; each holds what its step held."""
        self.manager.gate.release(100)
        self.saver.close(LIMIT_S)
        entries = self.manager.entries()[::-1]
        for entry in entries:
            assert bool((self.manager.load(entry).state["model"]["weight"] == entry.step).all())
        return [entry.step for entry in entries]


@pytest.mark.parametrize(
    ("when_behind", "given_up", "kept"), [("skip", [3, 4, 5], [1, 2]), ("replace", [2, 3, 4], [1, 5])]
)
def test_what_is_given_up_while_storage_is_behind_is_logged_and_counted(
    tmp_path: Path, when_behind: str, given_up: list[int], kept: list[int]
) -> None:
    """Storage takes the first save for as long as five steps take; a second one waits."""
    trained = Trained(tmp_path, WhenBehind(when_behind))
    with structlog.testing.capture_logs() as logs:
        for number in range(5):
            trained.step()
            assert trained.saver.attempt() is None
            assert number or trained.manager.began.acquire(timeout=LIMIT_S)
        assert [each["step"] for each in logs if each["event"] == "checkpoint.given_up"] == given_up
    assert trained.counted("save.failed") == 3
    assert trained.end() == kept
    assert trained.counted("save.ok") == 2


def test_a_background_save_that_fails_shows_in_log_and_metric_and_the_state_counts_as_unsaved(tmp_path: Path) -> None:
    trained = Trained(tmp_path, WhenBehind.WAIT)
    trained.manager.full = {1}
    trained.manager.gate.release(100)
    trained.step()
    assert trained.saver.attempt() is None
    trained.saver.wait()
    assert trained.saver.has_failed
    assert trained.saver.unsaved
    assert trained.counted("save.failed") == 1
    assert isinstance(trained.saver.make_durable(), StorageError)
    trained.step()
    assert trained.saver.make_durable() is None
    assert trained.end() == [2]


def test_a_state_is_saved_by_time_once_and_again_if_that_failed(tmp_path: Path) -> None:
    """Amid a long evaluation, say: else it would take the place of all older checkpoints."""
    clock = ManualClock()
    trained = Trained(tmp_path, cadence=Cadence(every_s=60.0), clock=clock)
    trained.manager.full = {1}
    trained.manager.gate.release(100)

    def saved() -> bool:
        """Whether a save was due, a minute later."""
        clock.advance(60.0)
        due = trained.saver.due_by_time()
        if due:
            assert trained.saver.attempt() is None
            trained.saver.wait()
        return due

    trained.step()
    assert saved()
    trained.manager.full = set()
    assert [saved() for _ in range(3)] == [True, False, False]
    trained.step()
    assert [saved() for _ in range(2)] == [True, False]
    assert trained.end() == [1, 2]


def test_a_snapshot_with_a_nan_is_refused_though_training_has_gone_on(tmp_path: Path) -> None:
    """Also one that was finite again a moment later; the ranks learn of it once, at the next boundary."""
    trained = Trained(tmp_path, WhenBehind.WAIT)
    trained.manager.gate.release(100)
    with structlog.testing.capture_logs() as logs:
        for value in (None, float("nan"), None):
            trained.step(value)
            assert trained.saver.attempt() is None
        trained.saver.wait()
    (failed,) = [each for each in logs if each["event"] == "checkpoint.failed"]
    assert (failed["step"], "'weight' is no longer finite" in failed["reason"]) == (2, True)
    assert (trained.saver.refused(), trained.saver.refused()) == (True, False)
    assert trained.counted("save.failed") == 1
    trained.step(float("inf"))
    with pytest.raises(NonFiniteError, match="'weight'"):
        trained.saver.save({}, wait=True)
    assert trained.end() == [1, 3]


def test_a_wait_for_storage_or_the_files_of_other_places_ends_with_the_round(tmp_path: Path) -> None:
    """Both copies are being written when a rank dies: the others join the next round at once. So do those that resume
    first, and let the saves under way end."""
    trained, works = Trained(tmp_path, WhenBehind.WAIT), InterruptibleWaits(interruptible=True)
    group = ShardGroup(ShardLayout("cpu", (1,), ("dp_shard",), 0, 1).mesh)
    trained.saver.serve(saves=True, part=ShardPart(group, Control(works=works), writes=True))
    for _ in range(2):
        trained.step()
        assert trained.saver.attempt() is None
    trained.step()
    threading.Timer(0.2, works.end, ["a place is gone"]).start()
    storage = partial(trained.saver.wait, Control(works=works))
    for waits in (trained.saver.attempt, trained.saver.make_durable, storage):
        with pytest.raises(RoundBrokenError, match="a place is gone"):
            waits()
    assert trained.end() == [1, 2]


@pytest.mark.parametrize("full", [False, True])
def test_a_save_on_demand_that_has_ended_when_training_goes_on_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    """As every save without memory for a copy; the next request is answered too, whether or not storage was full."""
    monkeypatch.setattr(arena, "available", lambda: 0)
    trained, request, answers = Trained(tmp_path / "saved"), tmp_path / "request", list[Any]()
    on_demand = trained.saver.on_demand
    monkeypatch.setattr(on_demand, "_file", request)
    monkeypatch.setattr(trained.tracker, "set_notes", lambda on_demand: answers.append(on_demand))
    trained.manager.full = {1} if full else set()
    trained.manager.gate.release(100)
    for asked in ("a", "b"):
        trained.step()
        request.write_text(asked)
        assert trained.saver.due_on_demand()
        assert trained.saver.attempt() is None
        assert not trained.saver.due_on_demand()
    assert [each["id"] for each in answers] == ["a", "b"]
    assert [each.get("problem") for each in answers] == ["step 1: full" if full else None, None]
    trained.end()


def test_copies_are_made_again_when_there_is_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that only stay in memory too, a minute later; the log says both."""
    files, clock, left = (tmp_path / "0", tmp_path / "1"), ManualClock(), [0]
    for each in files:
        each.touch()
    monkeypatch.setattr(arena, "available", lambda: left[0])
    trained = Trained(tmp_path / "saved", clock=clock, memory=Memory(files, 1.0))
    trained.manager.gate.release(100)

    def copied() -> int | None:
        """The step of the newest copy, after a step and a wait of 40 s."""
        clock.advance(40.0)
        trained.step()
        trained.saver.copy_if_due()
        trained.saver.wait()
        newest = trained.saver.left_in_memory()
        return newest.manifest.step if newest is not None else None

    with structlog.testing.capture_logs() as logs:
        assert copied() is None
        left[0] = 1 << 40
        assert [copied() for _ in range(3)] == [None, 3, 4]
    assert [each["event"] for each in logs] == ["checkpoint.not_beside", "checkpoint.beside_again"]
    trained.end()


def test_without_memory_a_save_waits_for_other_places_no_longer_than_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made in the main thread, which must join the next round."""
    monkeypatch.setattr(arena, "available", lambda: 0)
    trained, works = Trained(tmp_path, WhenBehind.WAIT), InterruptibleWaits(interruptible=True)
    group: Any = GroupRank(0)
    trained.saver.serve(saves=True, part=ShardPart(group, Control(works=works), writes=True))
    trained.manager.gate.release(100)
    trained.step()
    threading.Timer(0.2, works.end, ["place 1 is gone"]).start()
    began = time.monotonic()
    assert trained.saver.attempt() is None
    assert time.monotonic() - began < SHARDS_LEAST_PATIENCE_S / 2
    assert trained.end() == []


def test_a_process_alone_that_waits_for_storage_says_so_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, and at its start, when it looks whether it can write and what there is: storage answers then."""
    monkeypatch.setattr(waiting, "AWAITED_S", 0.05)
    trained, logs = Trained(tmp_path, WhenBehind.WAIT), list[Any]()
    manager = trained.manager
    trained.step()
    assert trained.saver.attempt() is None

    def said() -> None:
        eventually(lambda: sum(each["event"] == "storage.awaited" for each in logs) >= 2, "it does not say so again")

    def slow(at: Callable[..., Any]) -> Callable[..., Any]:
        def later(*given: Any) -> Any:
            said()
            return at(*given)

        return later

    def restored() -> None:
        stored = StoredStates(manager, trained.tracker)
        restore(Control(), Control(), stored, dict, lambda tree: None, lambda origin: None)

    monkeypatch.setattr(manager, "check_writable", slow(manager.check_writable))
    monkeypatch.setattr(manager, "newest", slow(manager.newest))
    release = threading.Thread(target=slow(manager.gate.release), args=[100])
    for act in (trained.saver.make_durable, lambda: check_storage(manager, Control(), WorkerEnvironment()), restored):
        with structlog.testing.capture_logs() as captured:
            logs = captured
            if not release.ident:
                release.start()
            act()
            said()
    release.join(LIMIT_S)
