"""Memory that is used again: what is held does not change, and too little memory is found beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint import memory as arenas
from elastic_trainer.checkpoint.manifest import FileImage, Image, OnDevice
from elastic_trainer.checkpoint.memory import SLOTS, Arena, Cuda, Held, NoRoomError


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
    monkeypatch.setattr(arenas, "available", lambda: None)
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
    machine = arenas._of_machine()
    assert machine is not None
    assert machine > 1 << 20


def test_bodies_begin_where_in_a_page_they_begin_in_their_file() -> None:
    """So that the disk can take them from there."""
    held = Arena().hold(image(1, 100_000))
    for file in held.image.files:
        (body,) = file.body()
        assert (np.frombuffer(body, np.uint8).ctypes.data - len(file.head)) % 4096 == 0


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

    def mark(self, devices: Iterable[Any]) -> Callable[[], None]:
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
    """A slot that grows is pinned anew, one that closes is free; a state that is on no device pins nothing."""
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


def test_memory_that_cannot_be_pinned_is_filled_all_the_same() -> None:
    arena = Arena(cuda=Stream(refuses=True))
    held = arena.hold(on_device(image(2.0)))
    held.arrived()
    assert content(held.image) == content(image(2.0))
    arena.close()
