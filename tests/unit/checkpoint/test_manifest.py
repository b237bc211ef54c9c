"""The manifest and checksums: any change of any bit is seen, and numbers that are not finite are named."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, SaveInfo, codec
from elastic_trainer.checkpoint.layout import UnreadableError
from elastic_trainer.checkpoint.manifest import (
    FORMAT,
    FileRecord,
    Image,
    Manifest,
    checked,
    checked_fields,
    checksum,
    record,
    records,
    seal,
    unseal,
)
from elastic_trainer.errors import CheckpointError, NonFiniteError

NAME = "step-000000120-r7-0123456789ab"


def manifest(**changes: object) -> Manifest:
    values = {
        "name": NAME, "step": 120, "round": 7, "epoch": 2, "samples": 640, "world_size": 4, "created": 1.5e9,
        "metrics": {"loss": 0.25, "broken": math.nan, "far": -math.inf},
        "fields": {"seed": 7, "nested": [1, None, {"a": "ü"}]},
        "files": [FileRecord(name="a.bin", size=5, head_size=2, chunk_size=2, chunks=("0", "1", "2"))],
    }  # fmt: skip
    return Manifest.model_validate({**values, **changes})


def test_a_manifest_comes_back() -> None:
    back = unseal(seal(manifest()), NAME)
    assert math.isnan(back.metrics["broken"])
    assert back.metrics["far"] == -math.inf
    assert back.model_dump(exclude={"metrics"}) == manifest().model_dump(exclude={"metrics"})


def test_any_change_of_the_file_is_seen() -> None:
    """Each flipped bit of body, checksum, punctuation and white space; each truncation; anything appended."""
    whole = seal(manifest())
    number = int.from_bytes(whole)
    flipped = ((number ^ 1 << bit).to_bytes(len(whole)) for bit in range(8 * len(whole)))
    for content in (*flipped, *(whole[:length] for length in range(len(whole))), whole + b"\n", whole + whole):
        with pytest.raises(DamagedError):
            unseal(content, NAME)


def test_the_manifest_of_another_checkpoint_is_damage() -> None:
    with pytest.raises(DamagedError, match="is that of"):
        unseal(seal(manifest()), NAME.replace("120", "121"))


def test_a_newer_format_is_not_damage() -> None:
    """What a later version wrote may be good: it is unreadable here, and the hint says upgrade."""
    with pytest.raises(UnreadableError, match="upgrade"):
        unseal(seal(manifest(format=FORMAT + 1)), NAME)


def test_a_sealed_manifest_with_bad_values_names_the_field() -> None:
    wrong = manifest().model_copy(update={"step": -1})
    with pytest.raises(DamagedError, match="'step'"):
        unseal(seal(wrong), NAME)


@pytest.mark.parametrize(("size", "head", "count"), [(5, 2, 2), (5, 2, 4), (0, 0, 1), (5, 6, 1), (5, 0, 2), (8, 8, 2)])
def test_sizes_and_checksums_must_fit_together(size: int, head: int, count: int) -> None:
    """A record with a chunk too few or too many would leave bytes unverified."""
    with pytest.raises(ValidationError, match="do not match"):
        FileRecord(name="a", size=size, head_size=head, chunk_size=2, chunks=("x",) * count)


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", ".hidden", "", "a/b"])
def test_a_file_name_cannot_leave_the_checkpoint(name: str) -> None:
    with pytest.raises(ValidationError):
        FileRecord(name=name, size=0, head_size=0, chunk_size=1, chunks=())


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object(), b"x"], ids=lambda value: type(value).__name__)
def test_fields_that_are_not_json_are_refused_by_name(value: object) -> None:
    with pytest.raises(CheckpointError, match="'bad'"):
        checked_fields({"good": 1, "bad": value})


def test_the_checksum_is_xxh3_128() -> None:
    """The algorithm is part of the format: the published digest of the empty input."""
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"


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
