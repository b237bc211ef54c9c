"""Copies in memory: what is held does not change, and what a killed process leaves is whole or nothing."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, Owner, SaveInfo, StateSnapshot, codec
from elastic_trainer.checkpoint import memory as arenas
from elastic_trainer.checkpoint.manifest import FileImage, Image, OnDevice
from elastic_trainer.checkpoint.memory import (
    DATA,
    SLOTS,
    Cuda,
    Held,
    NoRoomError,
    Parts,
    break_seal,
    file_begins,
    read,
    seal_as,
)
from elastic_trainer.checkpoint.reading import read_state
from tests.unit.checkpoint.states import GroupRank, descriptor_of, flipped, newest_of, records, same, training_state


def content(image: Image) -> dict[str, bytes]:
    return {file.name: file.head + b"".join(map(bytes, file.body())) for file in image.files}


def image(value: float, size: int = 1000) -> Image:
    return codec.encode({"w": torch.full((size,), value), "few": torch.tensor([value]), "step": int(value)})


def test_a_copy_stays_as_it_was_when_the_state_changes() -> None:
    """Byte by byte, head and all files; also when it is read twice."""
    weights = torch.arange(5000.0)
    state = {"w": weights, "text": "x" * 10_000}
    expected = content(codec.encode(state))
    arena = Arena()
    held = arena.hold(codec.encode(state))
    weights.add_(1)
    assert content(held.image) == content(held.image) == expected
    assert content(codec.encode(state)) != expected
    for file in held.image.files:  # each begins where in a page it begins in its file: the disk takes it from there
        (body,) = file.body()
        assert (np.frombuffer(body, np.uint8).ctypes.data - len(file.head)) % 4096 == 0


def test_slots_are_used_again_and_grow() -> None:
    """The memory of a released slot takes the next image; a larger one gets more."""
    arena = Arena()
    held = [arena.hold(image(number)) for number in range(SLOTS)]
    assert arena.full
    with pytest.raises(RuntimeError, match="all slots"):
        arena.hold(image(9))
    size = arena.size
    for number, each in enumerate(held):
        assert content(each.image) == content(image(number))
        arena.release(each)
    again: Held | None = None
    for number in range(5):
        again = arena.hold(image(number))
        assert content(again.image) == content(image(number))
        arena.release(again)
    assert arena.size == size
    large = arena.hold(image(3, 3_000_000))
    assert content(large.image) == content(image(3, 3_000_000))
    assert arena.size > size
    arena.close()
    assert arena.size == 0


def test_too_little_memory_is_found_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill the process; and the arena is as before."""
    arena = Arena()
    monkeypatch.setattr(arenas, "available", lambda: arenas.KEPT_FREE + 1000)
    with pytest.raises(NoRoomError, match="MB of memory are needed"):
        arena.hold(image(1))
    assert not arena.full
    monkeypatch.undo()
    assert content(arena.hold(image(1)).image) == content(image(1))


def test_the_control_group_limits_what_is_available(tmp_path: Path) -> None:
    """Page cache that can be had back counts as free; without a limit the machine's memory counts."""
    assert arenas._of_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50000\n")
    assert arenas._of_group(tmp_path) == 350_000
    (tmp_path / "memory.max").write_text("max\n")
    assert arenas._of_group(tmp_path) is None
    assert arenas.available() > 1 << 20


def test_prepared_memory_is_what_the_first_copies_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows any more; what a slot holds stays; too little memory leaves it to the copy to say so."""
    arena = Arena()
    first = arena.hold(image(1))
    arena.prepare(4_000_000)
    size = arena.size
    assert size >= SLOTS * 4_000_000
    assert content(first.image) == content(image(1))
    assert content(arena.hold(image(2, 400_000)).image) == content(image(2, 400_000))
    assert arena.size == size
    monkeypatch.setattr(arenas, "available", lambda: 1000)
    arena.prepare(100_000_000)
    assert content(first.image) == content(image(1))
    arena.close()
    arena.prepare(4_000_000)
    assert arena.size == 0


def test_memory_does_not_move_while_a_state_is_copied_into_it() -> None:
    """Preparing, in another thread, waits for the slot that is being filled."""
    arena, free = Arena(), list[bool]()

    def body() -> Iterable[memoryview]:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(lambda: arena._slots[0]._growing.acquire(blocking=False)).result())
        return (memoryview(b"content"),)

    held = arena.hold(Image((FileImage("a", b"", 7, body),)))
    assert (free, content(held.image)) == ([False], {"a": b"content"})


class Stream(Cuda):
    """A device whose stream does what it was given when somebody waits for it."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.pinned: list[int] = []
        self._refuses = refuses

    def pin(self, memory: Any) -> bool:
        self.pinned += [] if self._refuses else [memory.ctypes.data]
        return not self._refuses

    def unpin(self, memory: Any) -> None:
        self.pinned.remove(memory.ctypes.data)

    def queue(self, target: Any, data: Any) -> None:
        self.waiting.append(lambda: np.copyto(target, data))

    def record(self, devices: Iterable[Any]) -> Callable[[], None]:
        mine = len(self.waiting)
        assert devices

        def wait() -> None:
            for each in self.waiting[:mine]:
                each()
            del self.waiting[:mine]

        return wait


def on_device(image: Image) -> Image:
    """``image`` as if its tensors lay on a device."""
    return replace(image, files=tuple(replace(file, parts=partial(_parts, file)) for file in image.files))


def _parts(file: FileImage) -> Iterable[OnDevice]:
    return (OnDevice(np.frombuffer(view, np.uint8)) for view in file.body())


def test_what_is_on_a_device_arrives_as_it_was_though_training_goes_on() -> None:
    """The copy does not wait for the device, whose later update comes behind it."""
    weights = torch.arange(5000.0)
    expected, cuda = content(codec.encode({"w": weights})), Stream()
    arena = Arena(cuda=cuda)
    held = arena.hold(on_device(codec.encode({"w": weights})))
    cuda.waiting.append(lambda: weights.add_(1))
    assert content(held.image) != expected
    held.arrived()
    for update in cuda.waiting:
        update()
    assert content(held.image) == expected != content(codec.encode({"w": weights}))


def test_memory_for_devices_is_pinned_once_and_let_go_before_it_moves() -> None:
    """A slot that grows is pinned anew, one that closes is free; a state that is on no device pins nothing; what
    cannot be pinned is filled all the same."""
    cuda = Stream()
    arena = Arena(cuda=cuda)
    for size in (1000, 900_000, 3_000_000, 2_000_000):
        for _ in range(SLOTS):
            held = arena.hold(on_device(image(1.0, size)))
            held.arrived()
            arena.release(held)
        assert len(cuda.pinned) == SLOTS
    arena.close()
    assert cuda.pinned == []
    other = Arena(cuda=cuda)
    other.hold(image(1.0))
    assert cuda.pinned == []
    other.prepare(5_000_000, pinned=True)
    assert len(cuda.pinned) == SLOTS
    refusing = Arena(cuda=Stream(refuses=True))
    held = refusing.hold(on_device(image(2.0)))
    held.arrived()
    assert content(held.image) == content(image(2.0))


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
    arena: Arena, manager: CheckpointManager, state: Any, step: int, *, sealed: bool = True, shard_group: Any = None
) -> None:
    """What a worker does before it is killed."""
    info = SaveInfo(step, 1)
    held = arena.hold(manager.encode(state, info, shard_group=shard_group))
    if sealed:
        manifest = manager.draft(info).with_files(records(held.image))
        seal_as(arena.descriptor(held), manifest, manager.location, OWNER.job)
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


def test_the_ranks_of_a_sharded_state_make_one_snapshot_when_all_hold_one_step(tmp_path: Path) -> None:
    """The newest step that all have, whichever is ahead; its files are those of an ordinary checkpoint."""
    groups = [GroupRank(index, own=index) for index in (0, 1)]
    descriptors = [[os.memfd_create("test") for _ in range(SLOTS)] for _ in groups]
    files = [[Path(f"/proc/self/fd/{each}") for each in mine] for mine in descriptors]
    manager = CheckpointManager(tmp_path, owner=OWNER)

    def leave_shard(index: int, step: int) -> None:
        state = {f"w{each.index}": torch.full((50,), step * 10.0 + each.index) for each in groups}
        own = Arena(files[index], beside=files[1 - index])
        leave(own, manager, state, step, shard_group=groups[index])

    for index, step in ((0, 1), (0, 2), (1, 1)):
        leave_shard(index, step)
    assert Arena(files[0]).newest() is None
    both = left(files[0], files[1])
    assert (both.order, both.stored, len(both.memories)) == ((1, 1), False, 2)
    leave_shard(1, 2)
    leave_shard(0, 3)  # in place of step 1: the one that both hold is filled last
    both = left(files[0], files[1])
    assert both.order == (1, 2)
    assert float(read_state(both, both.manifest)["w1"][0]) == 21.0
    manager.write(both.image(), both.manifest)
    loaded = newest_of(manager)
    assert (loaded.manifest.step, float(loaded.state["w0"][0])) == (2, 20.0)
    for each in (*descriptors[0], *descriptors[1]):
        os.close(each)


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


def test_a_cut_off_file_and_one_with_a_broken_seal_hold_nothing(files: list[Path], tmp_path: Path) -> None:
    """That is no damage: a process was killed while it copied."""
    leave(Arena(files), CheckpointManager(tmp_path), training_state(), 1)
    path = filled(files)
    whole = path.read_bytes()
    break_seal(descriptor := descriptor_of(left(files)))
    assert read(descriptor) is None
    path.write_bytes(whole)
    for size in (notes_end(path) - 1, DATA, 20, 0):
        os.truncate(path, size)
        assert Arena(files).newest() is None


def test_memory_that_cannot_be_opened_is_done_without(tmp_path: Path) -> None:
    """The agent is gone, or of another user: snapshots end with the process."""
    arena = Arena([tmp_path / "0", tmp_path / "1"])
    assert not arena.lasting
    arena.release(arena.hold(CheckpointManager(tmp_path).encode({"w": torch.ones(9)}, SaveInfo(1))))


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_every_byte_is_copied_once_to_its_place(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces smaller and larger than what one thread copies at a time, at any number of cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    source = np.random.default_rng(1).integers(0, 256, 50 << 20, dtype=np.uint8)
    target = np.zeros(len(source) + 100, np.uint8)
    parts, position = Parts(target), 0
    for size in (1, 7, 4096, 5 << 20, 13 << 20, 1000, 31 << 20):
        parts.add(50 + position, source[position : position + size].data)
        position += size
    parts.copy()
    assert np.array_equal(target[50 : 50 + position], source[:position])
    assert not target[:50].any()
    assert not target[50 + position :].any()


def test_what_does_not_fit_is_raised() -> None:
    parts = Parts(np.zeros(10, np.uint8))
    for _ in range(20):
        parts.add(5, memoryview(bytes(4 << 20)))
    with pytest.raises(ValueError, match="broadcast"):
        parts.copy()
