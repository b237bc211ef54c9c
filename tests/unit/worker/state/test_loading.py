"""All ranks load one checkpoint together: equal bits, straight to their places, whoever finds it damaged."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from elastic_trainer.checkpoint import Arena, CheckpointManager, LoadInto, SaveInfo, StateSnapshot, commit, manifest
from elastic_trainer.checkpoint.manifest import records
from elastic_trainer.checkpoint.storage.posix import PosixSource
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.restore import Origin, state_digest
from tests.unit.worker.ranks import run_ranks
from tests.unit.worker.state.test_restore import Rank, damage

CHUNK = 4096


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a few hundred KB has as many parts as a large one."""
    for module, name in ((manifest, "CHUNK"), (manifest, "PIECE"), (commit, "CHUNK")):
        monkeypatch.setattr(module, name, CHUNK)


def large_state(seed: int = 0) -> dict[str, Any]:
    """Tensors that parts cut anywhere; strided ones, which take a way round; those of no and of one element."""
    made = torch.Generator().manual_seed(seed)
    many = {f"t{index}": torch.randn(17 * index, generator=made) for index in range(60)}
    return {
        "model": many | {"strided": torch.randn(300, 100, generator=made).t(), "half": torch.randn(5001).bfloat16()},
        "step": torch.tensor(float(seed)),
        "raw": b"bytes" * 3000,
    }


class LargeRank(Rank):
    """Its live tensors have other values than those that are stored."""

    def __init__(self, control: Control, directory: Path | None) -> None:
        super().__init__(control, directory)
        self.tensors = large_state(seed=100 + control.rank)["model"]
        self.state = {"model": self.tensors, "random": control.rank}

    def live(self) -> LoadInto:
        return LoadInto({"model": self.tensors})


def all_load(
    directories: list[Path | None], left: Mapping[int, StateSnapshot] | None = None
) -> list[tuple[Origin, dict[str, Any]]]:
    snapshots = left or {}

    def body(control: Control) -> tuple[Origin, dict[str, Any]]:
        rank = LargeRank(control, directories[control.rank])
        origin = rank.loaded(snapshots.get(control.rank))
        for name, tensor in rank.tensors.items():
            assert rank.state["model"][name] is tensor, f"{name} was not read into the live tensor"
        return origin, rank.state

    return run_ranks(len(directories), body)


def kept(directory: Path, step: int, parts: int = 1) -> dict[str, Any]:
    manager, info = CheckpointManager(directory), SaveInfo(step, 1)
    state = large_state(step)
    manager.commit(manager.encode(state, info, parts=parts), manager.draft(info))
    return state


def equal(results: list[tuple[Origin, dict[str, Any]]], state: Mapping[str, Any]) -> bool:
    return all(state_digest(found) == state_digest(dict(state)) for _, found in results)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("seeing", [1, 2, 4], ids=lambda count: f"{count}_of_4_see_it")
def test_what_all_load_together_is_what_was_saved_in_the_tensors_that_were_there(
    tmp_path: Path, seeing: int, parts: int
) -> None:
    """With one reader and with several, which read in turns."""
    state = kept(tmp_path / "a", 7, parts=parts)
    with capture_logs() as logs:
        assert equal(all_load([tmp_path / "a"] * seeing + [None] * (4 - seeing)), state)
    assert [line["readers"] for line in logs if line["event"] == "checkpoint.loaded"] == [seeing]


@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_one_rank_finds_damaged_makes_all_choose_again(tmp_path: Path) -> None:
    """Its node's copy alone is damaged: the others' is loaded. All see the damaged one: the one before it is."""
    before, state = kept(tmp_path / "a", 6), kept(tmp_path / "a", 7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    damage(tmp_path / "b", 7)
    results = all_load([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert equal(results, state)
    assert [len(list(node.glob("corrupt-*"))) for node in (tmp_path / "a", tmp_path / "b")] == [0, 1]
    damage(tmp_path / "a", 7)
    assert equal(all_load([tmp_path / "a"] * 3), before)
    assert len(list((tmp_path / "a").glob("corrupt-*"))) == 1


@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_one_rank_cannot_read_now_is_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is quarantined; a rank that cannot read at all still gets the state."""
    state = kept(tmp_path / "a", 7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    reading = PosixSource.read_into

    def failing(source: PosixSource, buffer: memoryview, offset: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{source._descriptor}")
        if "/b/" in path and "tensors" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return reading(source, buffer, offset)

    monkeypatch.setattr(PosixSource, "read_into", failing)
    for directories in (["a", "b", "a"], ["b", "a", "b"]):
        assert equal(all_load([tmp_path / name for name in directories]), state)
    assert not [*tmp_path.glob("*/corrupt-*")]


@pytest.mark.usefixtures("small_chunks")
def test_what_one_node_holds_in_memory_reaches_the_others_from_there(tmp_path: Path) -> None:
    """It is newer than what all of them see in storage; nobody reads that."""
    kept(tmp_path / "a", 7)
    manager, arena, info, state = CheckpointManager(tmp_path / "a"), Arena(), SaveInfo(9, 1), large_state(9)
    held = arena.hold(manager.encode(state, info))
    arena.seal(held, manager.draft(info).with_files(records(held.image)), manager.location, None)
    left = arena.newest()
    assert left is not None
    with capture_logs() as logs:
        results = all_load([tmp_path / "a"] * 4, {2: left})
    assert equal(results, state)
    assert {origin.stored for origin, _ in results} == {False}
    assert "checkpoint.loaded" not in [line["event"] for line in logs]
