"""One pass for checksums and numbers that are not finite; a commit does not hash what is hashed already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, SaveInfo, codec
from elastic_trainer.checkpoint.manifest import Image, checked, record, records
from elastic_trainer.errors import NonFiniteError

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def copy(state: dict[str, torch.Tensor], *watched: str) -> Image:
    return Arena().hold(codec.encode(state, {name: state[name] for name in watched})).image


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 599_999, 600_000 - 1 - 7])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float, at: int) -> None:
    """In any piece, and named; what is not watched may be anything. (E4M3 has no infinity.)"""
    state = {"before": torch.ones(300_001), "w": torch.ones(600_000), "mask": torch.full((5,), float("-inf"))}
    state = {name: each.to(dtype) for name, each in state.items()}
    good = copy(state, "before", "w")
    assert checked(good).size == good.size
    state["w"][at] = float("nan") if dtype is torch.float8_e4m3fn else value
    with pytest.raises(NonFiniteError, match="'w'"):
        checked(copy(state, "before", "w"))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    """Though their sum is not."""
    limits = torch.finfo(dtype)
    numbers = [limits.max, limits.max, limits.min, limits.min, limits.max] * 9
    state = {"w": torch.tensor(numbers, dtype=torch.float64).to(dtype)}
    checked(copy(state, "w"))


def test_one_of_thousands_of_small_parameters_is_named() -> None:
    state = {f"w{number}": torch.ones(number % 7 + 1) for number in range(3000)}
    checked(copy(state, *state))
    state["w1234"][0] = float("nan")
    with pytest.raises(NonFiniteError, match="'w1234'"):
        checked(copy(state, *state))


def test_a_commit_takes_no_checksums_that_the_image_has(tmp_path: Path) -> None:
    """It publishes the same files; and bytes from elsewhere, which come without checksums, are compared."""
    manager = CheckpointManager(tmp_path)
    image = copy({"w": torch.randn(3_000_000)})
    known = checked(image)
    manifests = [manager.draft(SaveInfo(step)).with_files(records(image)) for step in (1, 2, 3)]
    entries = [manager.write(image, manifests[0]).entry, manager.write(known, manifests[1]).entry]
    first, second = ({path.name: path.read_bytes() for path in each.path.iterdir()} for each in entries)
    assert tuple(map(record, known.files)) == manifests[0].files
    assert {name for name in first if first[name] != second[name]} == {"manifest.json"}
    assert torch.equal(manager.load(entries[1]).state["w"], manager.load(entries[0]).state["w"])
    (body,) = image.files[0].body()
    body[5] ^= 1
    with pytest.raises(DamagedError, match="changed in memory"):
        manager.write(image, manifests[2])
    damaged = manager.write(known, manifests[2]).entry
    with pytest.raises(DamagedError, match="checksum"):
        manager.load(damaged)


def test_a_body_that_is_not_all_there_gets_no_checksums() -> None:
    image = copy({"w": torch.ones(9)})
    longer = replace(image.files[0], body_size=image.files[0].body_size + 1)
    with pytest.raises(RuntimeError, match=r"received \d+ of \d+ bytes"):
        checked(Image((longer,)))
