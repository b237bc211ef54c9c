"""From boxes in files to boxes in memory: whatever is cut how, each byte arrives where it belongs, and no other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, DamagedError, LoadInto, SaveInfo, reading
from elastic_trainer.checkpoint.tensors import TensorSlice
from elastic_trainer.errors import CheckpointError
from tests.unit.checkpoint.states import flip_bit, newest_of, same
from tests.unit.checkpoint.test_tensors import committed

KINDS = ((torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.bool, "BOOL"), (torch.int64, "I64"))


def cuts(shape: tuple[int, ...], chance: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that make up ``shape``: offsets and shapes."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(chance.randrange(6)):
        offset, size = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(len(shape))
        first = chance.randint(0, size[axis])
        for begin, end in ((0, first), (first, size[axis])):
            moved = tuple(o + begin * (a == axis) for a, o in enumerate(offset))
            boxes.append((moved, tuple(end - begin if a == axis else s for a, s in enumerate(size))))
    return [box for box in boxes if all(box[1])]


@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_any_cut_are_read_into_live_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Contiguous and strided ones, of several types; what is around them in memory stays."""
    monkeypatch.setattr(reading, "MOST_STAGED", 300)
    chance = random.Random(seed)
    wholes: dict[str, torch.Tensor] = {}
    parts = []
    for number, (dtype, kind) in enumerate(KINDS):
        shape = tuple(chance.randint(1, 9) for _ in range(chance.randint(1, 3)))
        whole = wholes[f"t{number}"] = torch.randint(0, 100, shape).to(dtype)
        for offset, size in cuts(shape, chance):
            box = whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
            parts.append((TensorSlice(f"t{number}", kind, shape, offset, size), box))
    chance.shuffle(parts)
    storage, manifest = committed([parts[0::2], parts[1::2]], list(wholes), tmp_path)
    live: dict[str, torch.Tensor] = {}
    around: dict[str, torch.Tensor] = {}
    for name, whole in wholes.items():
        wide = torch.full([size + 2 for size in whole.shape], 1).to(whole.dtype)
        inner = wide[tuple(slice(1, -1) for _ in whole.shape)]
        live[name], around[name] = (inner, wide) if chance.random() < 0.5 else (torch.zeros_like(whole), wide)
    state = reading.read_state(storage, manifest, LoadInto(live))
    assert same(state, wholes)
    assert all(state[name] is live[name] for name in wholes)
    for name, wide in around.items():
        wide[tuple(slice(1, -1) for _ in wide.shape)] = 1
        assert bool((wide == 1).all()), name


def saved(directory: Path, state: dict[str, Any]) -> CheckpointManager:
    manager = CheckpointManager(directory)
    manager.save(state, SaveInfo(1))
    return manager


def test_live_tensors_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    """What has another shape or type, or is not there, comes back as new tensors."""
    tied = torch.randn(4)
    state = {
        "a": torch.randn(3, 2), "b": torch.randn(5), "c": [tied, tied], "bytes": b"y" * 9000,
        "z": torch.ones(2) * 1j,
    }  # fmt: skip
    live: dict[str, Any] = {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.float64), "z": torch.ones(2)}
    live["c"] = [torch.zeros(4)]
    loaded = newest_of(saved(tmp_path, state), LoadInto(live))
    assert same(loaded.state, state)
    assert loaded.state["a"] is live["a"]
    assert loaded.state["c"][0] is loaded.state["c"][1]
    assert live["b"].eq(0).all()


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    """The check sees types and shapes before a byte of the tensors is read."""
    manager = saved(tmp_path, {"a": torch.randn(3, 2), "step": 7})
    seen: list[Any] = []

    def fits(state: dict[str, Any]) -> bool:
        seen.extend((state["a"].shape, state["a"].device.type, state["step"]))
        raise CheckpointError("of another model")

    live = {"a": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError, match="of another model"):
        manager.load_newest(LoadInto(live, fits=fits))
    assert seen == [(3, 2), "meta", 7]
    loaded = newest_of(manager, LoadInto(live, fits=lambda state: False))
    assert loaded.state["a"].ne(0).all()
    assert live["a"].eq(0).all()


def test_over_a_damaged_state_the_one_before_is_read(tmp_path: Path) -> None:
    """Damage in the last chunk is found after the first ones have gone into the live tensors."""
    manager = CheckpointManager(tmp_path)
    states = [{"a": torch.full((5_000_000,), float(step)), "b": torch.randn(10)} for step in (1, 2)]
    for step, state in enumerate(states, 1):
        manager.save(state, SaveInfo(step))
    newest = manager.newest()
    assert newest is not None
    flip_bit(path := newest.path / "tensors.safetensors", 8 * path.stat().st_size - 8)
    live = {"a": torch.zeros(5_000_000), "b": torch.zeros(10)}
    with pytest.raises(DamagedError):
        manager.load(newest, LoadInto(live))
    assert live["a"][0] == 2.0
    loaded = newest_of(manager, LoadInto(live))
    assert loaded.manifest.step == 1
    assert same(live, states[0])
