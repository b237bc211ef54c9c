"""The differences of two checkpoints: metadata, values of their states, tensors bit by bit. Needs no torch.

*Runs in* any process, with a few hundred MB of tensors in memory at a time. *Fails by* DamagedError and similar errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from elastic_trainer.checkpoint.codec import ELEMENT_SIZE, Leaf, TensorEntry, outline
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.reading import (
    CheckpointSource,
    read_headers,
    read_in_turn,
    read_skeleton,
    whole_tensors,
)

FACTS = ("run", "step", "round", "epoch", "samples", "world_size", "best")
"""The fields of a manifest that describe a state, except metrics, fields and versions."""
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A differing value; None on the side that lacks it."""

    path: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """``different`` of the ``elements`` of a tensor differ, at most by ``largest`` (nan if an element is NaN).

    ``left`` and ``right`` are type and shape; None if the tensor is missing. Elements are compared if these agree.
    """

    path: str
    left: str | None
    right: str | None
    elements: int = 0
    different: int = 0
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Differences:
    """All differences; ``equal`` is the number of equal tensors."""

    facts: tuple[ValueDifference, ...]
    values: tuple[ValueDifference, ...]
    tensors: tuple[TensorDifference, ...]
    equal: int

    def __bool__(self) -> bool:
        return bool(self.facts or self.values or self.tensors)


def compare(left: CheckpointSource, right: CheckpointSource) -> Differences:
    """Read both; tensors are read only where their files differ. How they came to be, their ledger, is left out."""
    leaves = [
        {path: leaf for path, leaf in outline(read_skeleton(*each), name).items() if path[:1] != ("ledger",)}
        for each, name in (((side.files, side.manifest), side.manifest.name) for side in (left, right))
    ]
    values = tuple(_values(*({p: e for p, e in side.items() if e.tensor is None} for side in leaves)))
    found, equal = _tensors(left, right, *leaves)
    return Differences(tuple(_facts(left.manifest, right.manifest)), values, tuple(found), equal)


def _facts(left: Manifest, right: Manifest) -> Iterator[ValueDifference]:
    both = [
        {name: getattr(each, name) for name in FACTS}
        | {f"metrics.{name}": value for name, value in each.metrics.items()}
        | {f"fields.{name}": value for name, value in each.fields.items()}
        | {f"versions.{name}": value for name, value in each.versions.items()}
        for each in (left, right)
    ]
    for name in dict.fromkeys([*both[0], *both[1]]):
        if not _alike(both[0].get(name), both[1].get(name)):
            yield ValueDifference(name, both[0].get(name), both[1].get(name))


def _values(left: Mapping[tuple[Any, ...], Leaf], right: Mapping[tuple[Any, ...], Leaf]) -> Iterator[ValueDifference]:
    for path in dict.fromkeys([*left, *right]):
        here, there = left.get(path), right.get(path)
        if here is None or there is None or not _alike(here.value, there.value):
            yield ValueDifference(shown(path), here and here.value, there and there.value)


def _alike(left: Any, right: Any) -> bool:
    return type(left) is type(right) and (repr(left) == repr(right) if isinstance(left, float) else bool(left == right))


def shown(path: tuple[Any, ...]) -> str:
    """``path`` in the format of stored tensors' names."""
    return "/".join(map(str, path))


def _tensors(
    left: CheckpointSource,
    right: CheckpointSource,
    here: Mapping[tuple[Any, ...], Leaf],
    there: Mapping[tuple[Any, ...], Leaf],
) -> tuple[list[TensorDifference], int]:
    names = [{path: leaf.tensor for path, leaf in side.items() if leaf.tensor is not None} for side in (here, there)]
    kinds = [_described(left), _described(right)]
    found, common = [], []
    for path in dict.fromkeys([*names[0], *names[1]]):
        ours, theirs = (kinds[side].get(names[side].get(path, "")) for side in (0, 1))
        if ours is not None and theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape):
            common.append((path, ours, theirs))
        else:
            kind, other = (None if each is None else described(each) for each in (ours, theirs))
            found.append(TensorDifference(shown(path), kind, other))
    if left.manifest.tensor_files() == right.manifest.tensor_files():  # all checksums and sizes are equal
        return found, len(common)
    equal = len(found)
    pairs = zip(
        read_in_turn(left.files, left.manifest, [ours for _, ours, _ in common]),
        read_in_turn(right.files, right.manifest, [theirs for _, _, theirs in common]),
        strict=True,
    )
    for (path, ours, _), ((_, a), (_, b)) in zip(common, pairs, strict=True):
        count, largest = difference(a, b, ours.dtype)
        if count:
            kind = described(ours)
            elements = ours.size // ELEMENT_SIZE[ours.dtype]
            found.append(TensorDifference(shown(path), kind, kind, elements, count, largest))
    return found, len(common) - len(found) + equal


def _described(side: CheckpointSource) -> dict[str, TensorEntry]:
    files = read_headers(side.files, side.manifest)
    return {each.name: each for each in whole_tensors(files, side.manifest)}


def described(tensor: TensorEntry) -> str:
    """``F32[2, 3]``."""
    return f"{tensor.dtype}{list(tensor.shape)}"


def difference(left: Any, right: Any, dtype: str) -> tuple[int, float]:
    """The number of elements with different bits, and their largest difference, from two arrays of bytes."""
    import numpy as np

    count, largest = 0, 0.0
    word = f"u{ELEMENT_SIZE[dtype]}"
    for start in range(0, left.size, _AT_ONCE):
        a, b = (each[start : start + _AT_ONCE].view(word) for each in (left, right))
        other = a != b
        if not other.any():
            continue
        count += int(other.sum())
        with np.errstate(all="ignore"):
            here, there = (numbers(each[other].view(np.uint8), dtype) for each in (a, b))
            largest = float(np.maximum(largest, np.abs(here - there).max()))
    return count, largest


def numbers(raw: Any, dtype: str) -> Any:
    """The bytes ``raw``, elements of type ``dtype``, as float64."""
    import numpy as np

    if dtype == "F8_E4M3":
        return _e4m3()[raw]
    if dtype == "BF16":
        elements = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E5M2":
        elements = (raw.astype(np.uint16) << 8).view(np.float16)
    else:
        elements = raw.view(f"<{'u' if dtype == 'BOOL' else dtype[0].lower()}{ELEMENT_SIZE[dtype]}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return elements.astype(np.float64)


@cache
def _e4m3() -> Any:
    """The 256 numbers of the type; without infinity, and with one NaN for each sign."""
    import numpy as np

    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    table = np.where(codes & 128, -1.0, 1.0) * np.where(exponent > 0, normal, np.ldexp(fraction / 8, -6))
    table[[127, 255]] = np.nan
    return table
