"""Pictures with one to three real digits, and key points that follow from their strokes: drawn on demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.seeds import key
from elastic_trainer.tasks.pose.scenes import Floats, Scene
from elastic_trainer.tasks.vision.digits import Digits
from elastic_trainer.tasks.vision.pillow import Image

INK = 128
"""A pixel is of the stroke from this value on."""
CANVAS = 64
_MOST = 3
_TRIES = 20
_APART = 2
_PURPOSE = 7

Box = tuple[int, int, int, int]


class DigitScenes:
    """Scene ``i`` of ``count``: one to three of ``digits``, drawn and placed as (seed, i) says, ink apart from ink.

    The points are the middle of the first and the last row and column that have ink (top, bottom, left, right), and the
    centre of the ink.
    """

    names: Sequence[str] = ("top", "bottom", "left", "right", "centre")

    def __init__(self, digits: Digits, count: int, seed: int) -> None:
        inked = (digits.images >= INK).any(axis=(1, 2))
        self._images, self._count, self._seed = digits.images[inked], count, seed

    def __len__(self) -> int:
        return self._count

    def scene(self, index: int) -> Scene:
        draws = np.random.Generator(np.random.PCG64(key(_PURPOSE, self._seed, index)))
        canvas = np.zeros((CANVAS, CANVAS), dtype=np.uint8)
        taken: list[Box] = []
        points, areas = [], []
        for _ in range(int(draws.integers(1, _MOST + 1))):
            image = self._images[int(draws.integers(len(self._images)))]
            box = _place(draws, ink_box(image), taken)
            if box is None:
                continue  # no room beside the others
            taken.append(box)
            left, top, right, bottom = ink_box(image)
            across, down = box[0] - left, box[1] - top
            canvas[box[1] : box[3], box[0] : box[2]] |= image[top:bottom, left:right]
            points.append(stroke_points(image) + np.array([across, down, 0.0]))
            areas.append(float((right - left) * (bottom - top)))
        return Scene(Image.fromarray(canvas).convert("RGB"), np.array(points), np.array(areas), np.zeros((0, 4)))


def _place(draws: np.random.Generator, ink: Box, taken: Sequence[Box]) -> Box | None:
    """Somewhere on the canvas for ink of that size, apart from what is there; None if that was not found."""
    width, height = ink[2] - ink[0], ink[3] - ink[1]
    for _ in range(_TRIES):
        left, top = int(draws.integers(CANVAS - width + 1)), int(draws.integers(CANVAS - height + 1))
        box = (left, top, left + width, top + height)
        if not any(_touch(box, other) for other in taken):
            return box
    return None


def _touch(one: Box, other: Box) -> bool:
    """Whether less than some pixels are between the two."""
    across = one[0] < other[2] + _APART and other[0] < one[2] + _APART
    return across and one[1] < other[3] + _APART and other[1] < one[3] + _APART


def ink_box(image: NDArray[np.uint8]) -> Box:
    """Left, top, right, bottom of all that is not black, the latter two exclusive."""
    rows, columns = np.flatnonzero(image.any(axis=1)), np.flatnonzero(image.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def stroke_points(image: NDArray[np.uint8]) -> Floats:
    """(5, 3): the points of a digit, which has ink, in its own pixels; all visible."""
    rows, columns = np.nonzero(image >= INK)
    ends = [(rows, rows.min()), (rows, rows.max()), (columns, columns.min()), (columns, columns.max())]
    at = [axis == value for axis, value in ends] + [np.ones(len(rows), dtype=bool)]
    return np.array([[columns[each].mean() + 0.5, rows[each].mean() + 0.5, 1.0] for each in at])
