"""Tensors in slices: which box of a tensor a file holds, whether boxes make it whole, how writers share a state. Pure.

A file says so in the ``__metadata__`` of its header, so it opens as any other safetensors file does: there a slice is a
tensor of its own, named by its box (``model/weight[0:512,0:1024]``).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.checkpoint.faults import DamagedError
from elastic_trainer.checkpoint.tensorfile import ELEMENT_SIZE, Placed, place

METADATA = "slices"
"""The key of the header's metadata. Its value is JSON: ``{name: {"tensor", "shape", "offset"}}``, all of the whole."""
UNCUT = 1 << 20
"""Tensors up to this size are not cut when a state is divided."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The box of ``shape`` elements at ``offset`` of the tensor ``tensor``, which has the shape ``whole``."""

    tensor: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return self.shape == self.whole

    @property
    def name(self) -> str:
        """What it is called in a file, if that name is free there."""
        if self.complete:
            return self.tensor
        return f"{self.tensor}[{','.join(f'{o}:{o + s}' for o, s in zip(self.offset, self.shape, strict=True))}]"

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * ELEMENT_SIZE[self.dtype]

    @property
    def span(self) -> tuple[int, int] | None:
        """The bytes of the whole tensor that it is, from a begin to an end; None where it has gaps there."""
        wide = next((axis for axis, size in enumerate(self.shape) if size != 1), len(self.shape))
        if self.shape[wide + 1 :] != self.whole[wide + 1 :]:
            return None
        begin = 0
        for offset, size in zip(self.offset, self.whole, strict=True):
            begin = begin * size + offset
        begin *= ELEMENT_SIZE[self.dtype]
        return begin, begin + self.size


def uncut(described: Iterable[Placed]) -> tuple[TensorSlice, ...]:
    """The tensors ``described``, each as one slice."""
    return tuple(
        TensorSlice(each.name, each.dtype, each.shape, (0,) * len(each.shape), each.shape) for each in described
    )


def split(described: Iterable[Placed], parts: int) -> tuple[tuple[TensorSlice, ...], ...]:
    """The tensors ``described`` in ``parts`` parts of about equal bytes; large ones are cut by rows.

    It depends on names, types and shapes alone, so writers that hold the same state agree without a word.
    """
    ordered = sorted(described, key=lambda each: each.name)
    total = sum(each.size for each in ordered)
    result: list[list[TensorSlice]] = [[] for _ in range(parts)]
    begin = 0
    for each in ordered:
        axis = next((axis for axis, size in enumerate(each.shape) if size > 1), None)
        if each.size <= UNCUT or axis is None:
            part = min(parts - 1, (begin + each.size // 2) * parts // max(1, total))
            result[part] += uncut([each])
        else:
            for part, (first, last) in enumerate(_rows(each, axis, begin, total, parts)):
                if first < last:
                    result[part].append(_cut(each, axis, first, last))
        begin += each.size
    return tuple(map(tuple, result))


def _rows(tensor: Placed, axis: int, begin: int, total: int, parts: int) -> Iterable[tuple[int, int]]:
    """The rows of each part, for a tensor that begins at byte ``begin`` of all ``total``."""
    rows = tensor.shape[axis]
    bytes_per_row = tensor.size // rows
    ends = (total * part // parts - begin for part in range(parts + 1))
    cuts = [max(0, min(rows, (end + bytes_per_row // 2) // bytes_per_row)) for end in ends]
    return itertools.pairwise(cuts)


def _cut(tensor: Placed, axis: int, first: int, last: int) -> TensorSlice:
    before, after = (0,) * axis, (0,) * (len(tensor.shape) - axis - 1)
    shape = (*tensor.shape[:axis], last - first, *tensor.shape[axis + 1 :])
    return TensorSlice(tensor.name, tensor.dtype, tensor.shape, (*before, first, *after), shape)


def named(slices: Sequence[TensorSlice]) -> dict[str, TensorSlice]:
    """``slices`` by their names in one file, in the same order.

    Each has its own, even where a tensor is called as a slice would be.
    """
    taken, result = {each.name for each in slices if each.complete}, {}
    for each in slices:
        name = each.name
        while not each.complete and name in taken:
            name += "#"
        taken.add(name)
        result[name] = each
    return result


def metadata(found: Mapping[str, TensorSlice]) -> dict[str, str]:
    """What the header of a file says about those of its tensors that are no whole ones."""
    cut = {
        name: {"tensor": each.tensor, "shape": each.whole, "offset": each.offset}
        for name, each in found.items()
        if not each.complete
    }
    return {METADATA: json.dumps(cut, separators=(",", ":"))} if cut else {}


def in_file(placed: Sequence[Placed], about: Mapping[str, Any], where: str) -> tuple[TensorSlice, ...]:
    """The slices of a file whose header has the tensors ``placed`` and the metadata ``about``, in the same order.

    DamagedError if the two do not fit together.
    """
    try:
        cut = json.loads(about.get(METADATA, "{}"))
        slices = tuple(_slice(each, cut.pop(each.name, None)) for each in placed)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"{where}: its header describes slices wrongly ({error})") from error
    if cut:
        raise DamagedError(f"{where}: its header describes the slice {next(iter(cut))!r}, which it does not hold")
    return slices


def _slice(placed: Placed, about: Mapping[str, Any] | None) -> TensorSlice:
    if about is None:
        return uncut([placed])[0]
    tensor, whole, offset = about["tensor"], tuple(about["shape"]), tuple(about["offset"])
    numbers = all(type(each) is int and 0 <= each < 1 << 62 for each in (*whole, *offset))
    if type(tensor) is not str or not numbers:
        raise ValueError(f"{placed.name!r} has no name or invalid sizes")
    if any(begin + size > most for begin, size, most in zip(offset, placed.shape, whole, strict=True)):
        raise ValueError(f"{placed.name!r} reaches beyond its tensor")
    return TensorSlice(tensor, placed.dtype, whole, offset, placed.shape)


def assemble(slices: Iterable[TensorSlice], where: str) -> tuple[Placed, ...]:
    """The whole tensors that ``slices`` make, placed one behind the other; DamagedError unless each is complete."""
    found: dict[str, list[TensorSlice]] = {}
    for each in slices:
        found.setdefault(each.tensor, []).append(each)
    for name, parts in found.items():
        if len({(each.dtype, each.whole) for each in parts}) > 1:
            raise DamagedError(f"{where}: the slices of tensor {name!r} do not agree about its type or shape")
        if not (len(parts) == 1 and parts[0].complete) and not _exact(parts):
            raise DamagedError(f"{where}: the slices of tensor {name!r} overlap, or leave a part of it out")
    return place([Placed(name, parts[0].dtype, parts[0].whole) for name, parts in found.items()])


def _exact(boxes: Sequence[TensorSlice]) -> bool:
    """Whether each element of the whole lies in one of ``boxes`` and no more."""
    if sum(math.prod(each.shape) for each in boxes) != math.prod(boxes[0].whole):
        return False
    near: list[TensorSlice] = []
    for box in sorted((each for each in boxes if math.prod(each.shape)), key=lambda each: each.offset):
        near = [each for each in near if each.offset[0] + each.shape[0] > box.offset[0]]
        if any(_overlap(each, box) for each in near):
            return False
        near.append(box)
    return True


def _overlap(one: TensorSlice, other: TensorSlice) -> bool:
    boxes = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < b + other_size and b < a + size for a, size, b, other_size in boxes)
