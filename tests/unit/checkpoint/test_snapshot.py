"""What a killed process leaves in memory: whole or nothing, and no changed bit goes unnoticed."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, Owner, SaveInfo, StateSnapshot
from elastic_trainer.checkpoint.manifest import records
from elastic_trainer.checkpoint.memory import DATA, SLOTS, break_seal, file_begins, read
from elastic_trainer.checkpoint.reading import read_state
from tests.drills.checkpoint.flipping import flipped
from tests.unit.checkpoint.states import descriptor_of, same, training_state

OWNER = Owner("run", "job")
SEAL = 48


@pytest.fixture
def files() -> Iterator[list[Path]]:
    """The memory files of an agent, as its workers open them."""
    descriptors = [os.memfd_create(f"test-{number}") for number in range(SLOTS)]
    yield [Path(f"/proc/self/fd/{each}") for each in descriptors]
    for each in descriptors:
        os.close(each)


def leave(
    arena: Arena,
    manager: CheckpointManager,
    state: dict[str, Any],
    step: int,
    *,
    sealed: bool = True,
    places: Place | None = None,
) -> None:
    """What a worker does before it is killed."""
    info = SaveInfo(step, 1)
    held = arena.hold(manager.encode(state, info, places=places))
    if sealed:
        manifest = manager.draft(info).with_files(records(held.image))
        arena.seal(held, manifest, manager.location, OWNER.job)
    arena.release(held)


def left(files: list[Path], beside: list[Path] | None = None) -> StateSnapshot:
    found = Arena(files, beside=beside or []).newest()
    assert found is not None
    return found


def test_a_successor_finds_the_newest_state_bit_by_bit(files: list[Path], tmp_path: Path) -> None:
    manager, arena = CheckpointManager(tmp_path, owner=OWNER), Arena(files)
    assert arena.lasting
    assert arena.newest() is None
    states = {step: training_state(seed=step) for step in (1, 2, 3)}
    for step, state in states.items():
        leave(arena, manager, state, step)
        found = left(files)
        assert same(read_state(found, found.manifest), state)
        assert (found.order, found.location, found.job, found.stored) == ((1, step), str(tmp_path), "job", False)


def test_the_newest_state_is_there_until_the_next_is_whole(files: list[Path], tmp_path: Path) -> None:
    """Also in a successor, whatever its predecessor filled last; and when a slot grows."""
    manager = CheckpointManager(tmp_path)
    for step, width in ((1, 100), (2, 3000), (3, 200), (4, 6000), (5, 100)):
        leave(Arena(files), manager, {"w": torch.full((width,), float(step))}, step)
        leave(Arena(files), manager, {"w": torch.zeros(width)}, step + 1, sealed=False)
        assert left(files).order == (1, step)
        assert float(read_state(left(files), left(files).manifest)["w"][0]) == step


def test_the_places_of_a_sharded_state_make_one_snapshot_when_all_hold_one_step(tmp_path: Path) -> None:
    """The newest step that all have, whichever is ahead; its files are those of an ordinary checkpoint."""
    places = [Place(index) for index in (0, 1)]
    descriptors = [[os.memfd_create("test") for _ in range(SLOTS)] for _ in places]
    files = [[Path(f"/proc/self/fd/{each}") for each in mine] for mine in descriptors]
    manager = CheckpointManager(tmp_path, owner=OWNER)

    def leave_shard(index: int, step: int) -> None:
        state = {f"w{each.index}": torch.full((50,), step * 10.0 + each.index) for each in places}
        own = Arena(files[index], beside=files[1 - index])
        leave(own, manager, state, step, places=places[index])

    for index, step in ((0, 1), (0, 2), (1, 1)):
        leave_shard(index, step)
    assert Arena(files[0]).newest() is None
    both = left(files[0], files[1])
    assert (both.order, both.stored, len(both.memories)) == ((1, 1), False, 2)
    leave_shard(1, 2)
    leave_shard(0, 3)  # in place of step 1: the one that both hold is filled last
    both = left(files[0], files[1])
    assert both.order == (1, 2)
    assert float(manager.load_snapshot(both).state["w1"][0]) == 21.0
    manager.write(both.image(), both.manifest)
    loaded = manager.load_newest()
    assert loaded is not None
    assert (loaded.manifest.step, float(loaded.state["w0"][0])) == (2, 20.0)
    for each in (*descriptors[0], *descriptors[1]):
        os.close(each)


class Place:
    """Place ``index`` of two, which writes the tensor of its number."""

    count = 2

    def __init__(self, index: int) -> None:
        self.index = index

    def writes(self, tensor: torch.Tensor) -> bool:
        return int(tensor[0]) % 10 == self.index


def test_a_rescued_state_is_an_ordinary_checkpoint(files: list[Path], tmp_path: Path) -> None:
    """Written by a process that has neither the state nor torch's objects; a second time it is refused."""
    state = training_state(seed=7)
    leave(Arena(files), CheckpointManager(tmp_path, owner=OWNER), state, 4)
    found = left(files)
    committed = CheckpointManager(found.location).write(found.image(), found.manifest)
    loaded = CheckpointManager(tmp_path).load_newest()
    assert loaded is not None
    assert (loaded.name, committed.name) == (found.manifest.name, found.manifest.name)
    assert same(loaded.state, state)


def test_no_changed_bit_goes_unnoticed(files: list[Path], tmp_path: Path) -> None:
    """Over seal, data and notes: found by whoever loads the state, and by whoever would commit it."""
    manager = CheckpointManager(tmp_path)
    leave(Arena(files), manager, training_state(width=60), 1)
    path = filled(files)
    used = [bit for begin, end in in_use(path) for bit in range(8 * begin, 8 * end)]

    def load() -> None:
        read_state(found(path), found(path).manifest)

    def rescue() -> None:
        CheckpointManager(tmp_path).write(found(path).image(), found(path).manifest)

    for bit in random.Random(3).sample(used, 500):
        with flipped(path, bit):
            for use in (load, rescue):
                with pytest.raises(DamagedError):
                    use()
    assert list(tmp_path.iterdir()) == []
    load()
    rescue()


def filled(files: list[Path]) -> Path:
    (path,) = (each for each in files if each.stat().st_size)
    return path


def found(path: Path) -> StateSnapshot:
    snapshot = read(int(path.name))
    assert snapshot is not None
    return snapshot


def in_use(path: Path) -> list[tuple[int, int]]:
    """The bytes of seal, files and notes; between them is nothing."""
    sizes = [record.size for record in found(path).manifest.files]
    *begins, notes = file_begins(sizes)
    files = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    return [(0, SEAL), *files, (notes, notes_end(path))]


def notes_end(path: Path) -> int:
    begin, size = struct.unpack_from("<QQ", path.read_bytes(), 8)
    return int(begin) + int(size)


def test_a_cut_off_file_holds_nothing(files: list[Path], tmp_path: Path) -> None:
    leave(Arena(files), CheckpointManager(tmp_path), training_state(), 1)
    path = filled(files)
    for size in (notes_end(path) - 1, DATA, 20, 0):
        os.truncate(path, size)
        assert Arena(files).newest() is None


def test_a_broken_seal_is_no_damage(files: list[Path], tmp_path: Path) -> None:
    """A process was killed while it copied."""
    leave(Arena(files), CheckpointManager(tmp_path), training_state(), 1)
    descriptor = descriptor_of(left(files))
    break_seal(descriptor)
    assert read(descriptor) is None


def test_memory_that_cannot_be_opened_is_done_without(tmp_path: Path) -> None:
    """The agent is gone, or of another user: snapshots end with the process."""
    arena = Arena([tmp_path / "0", tmp_path / "1"])
    assert not arena.lasting
    arena.release(arena.hold(CheckpointManager(tmp_path).encode({"w": torch.ones(9)}, SaveInfo(1))))
