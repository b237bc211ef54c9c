"""Plans reads of stored slices: from boxes in files to boxes in memory, in row-major order. Pure.

Bytes that are contiguous both in the file and in memory are read directly. All others take a detour: their rows are
read into a temporary buffer, and the box is copied from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.checkpoint.slices import TensorSlice
from elastic_trainer.checkpoint.tensorfile import ELEMENT_SIZE, Placed

MOST_DETOURS = 64 << 20
"""Maximum bytes of detours at a time, unless a single slice has more."""

Put = Callable[[tuple[slice, ...], Any], None]


@dataclass(frozen=True, slots=True)
class Goal:
    """The destination of the box of ``shape`` elements at ``offset`` of a tensor.

    To ``memory`` from byte ``begin`` on, if that is not None. ``put`` places a part: slices within the box, and the
    bytes as a numpy array with the dimensions of the part and one more, the bytes of an element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    put: Put
    memory: memoryview | None = None
    begin: int = 0


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file from ``begin`` to ``end``, and their destination."""

    begin: int
    end: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class Detour:
    """``rows`` of a stored slice, whose part ``chosen`` goes to ``box`` of a goal."""

    rows: Any
    chosen: tuple[slice, ...]
    box: tuple[slice, ...]
    put: Put

    def land(self) -> None:
        self.put(self.box, self.rows[self.chosen])


def plan(
    head_size: int, placed: Sequence[Placed], held: Sequence[TensorSlice], goals: Mapping[str, Goal]
) -> Iterator[tuple[list[FileRange], list[Detour]]]:
    """The reads of a file with the slices ``held``, located at ``placed``, in batches of bounded detours.

    Pieces that are adjacent both in the file and in memory form one segment: thousands of scalars are one read.
    """
    segments: list[FileRange] = []
    detours: list[Detour] = []
    run: tuple[memoryview, int] | None = None  # where the last segment went, and its end there
    for where, part in zip(placed, held, strict=True):
        goal = goals.get(part.tensor)
        common = None if goal is None or not where.size else _common(part, goal)
        if goal is None or common is None:
            run = None
            continue
        start = head_size + where.begin
        here = _within(part, common, part.offset, part.shape)
        there = _within(part, common, goal.offset, goal.shape)
        from_, to = here.span, there.span
        if from_ is None or to is None or goal.memory is None:
            detour, begin, end, view = _detour(here, there, goal)
            segments.append(FileRange(start + begin, start + end, view))
            detours.append(detour)
            run = None
            if sum(each.rows.nbytes for each in detours) >= MOST_DETOURS:
                yield segments, detours
                segments, detours = [], []
            continue
        begin, first, last = start + from_[0], goal.begin + to[0], goal.begin + to[1]
        if run is not None and run[0] is goal.memory and run[1] == first and segments[-1].end == begin:
            begin, first = segments[-1].begin, first - (segments[-1].end - segments[-1].begin)
            segments.pop()
        segments.append(FileRange(begin, start + from_[1], goal.memory[first:last]))
        run = (goal.memory, last)
    if segments:
        yield segments, detours


def _common(part: TensorSlice, goal: Goal) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The intersection of both boxes, as an offset and a shape; None if it is empty."""
    boxes = list(zip(part.offset, part.shape, goal.offset, goal.shape, strict=True))
    offset = tuple(max(a, b) for a, _, b, _ in boxes)
    shape = tuple(min(a + size, b + other) - max(a, b) for a, size, b, other in boxes)
    return (offset, shape) if all(size > 0 for size in shape) else None


def _within(
    part: TensorSlice,
    common: tuple[tuple[int, ...], tuple[int, ...]],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
) -> TensorSlice:
    """The box ``common`` relative to the box of ``shape`` at ``offset``."""
    moved = tuple(begin - other for begin, other in zip(common[0], offset, strict=True))
    return TensorSlice(part.tensor, part.dtype, shape, moved, common[1])


def _detour(here: TensorSlice, there: TensorSlice, goal: Goal) -> tuple[Detour, int, int, memoryview]:
    """The rows of the stored slice that ``here`` needs, and their byte range in it."""
    import numpy as np

    element = ELEMENT_SIZE[here.dtype]
    rows = here.shape[0] if here.shape else 1
    row = math.prod(here.whole[1:]) * element
    begin = here.offset[0] * row if here.offset else 0
    data: Any = np.empty(rows * row, np.uint8)
    box = tuple(slice(begin, begin + size) for begin, size in zip(there.offset, there.shape, strict=True))
    chosen = tuple(slice(begin, begin + size) for begin, size in zip(here.offset, here.shape, strict=True))
    chosen = (slice(None), *chosen[1:]) if chosen else ()
    shaped = data.reshape(rows, *here.whole[1:], element) if here.shape else data
    return Detour(shaped, chosen, box, goal.put), begin, begin + rows * row, memoryview(data)
