"""Pictures with key points, as they are stored and as a network sees them: scaled, turned, moved, perhaps mirrored.

Random numbers come from Python's generator, which the session keys by (seed, epoch, sample). Points are (x, y, visible)
in pixels, the middle of the first pixel being (0.5, 0.5).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastic_trainer.tasks.vision.augmentation import as_bytes
from elastic_trainer.tasks.vision.pillow import Image, ImageDraw

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, the (m, k, 3) points of its m instances, their areas (m,), and boxes (j, 4) of left, top, right,
    bottom that are not annotated. An instance has at least one visible point."""

    image: Image.Image
    points: Floats
    areas: Floats
    unknown: Floats


class Scenes(Protocol):
    """A data set of scenes. ``names`` are its k kinds of points; scene ``i`` is always the same."""

    @property
    def names(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def scene(self, index: int) -> Scene: ...


@dataclass(frozen=True, slots=True)
class Moves:
    """How far training may change a picture: ``rotation`` in degrees, ``shift`` as a part of the picture's side."""

    scale: tuple[float, float] = (1.0, 1.0)
    rotation: float = 0.0
    shift: float = 0.0
    flip: float = 0.0


def mirror_order(names: Sequence[str]) -> list[int]:
    """Which point each one is in a mirrored picture: ``left...`` and ``right...`` change places."""
    numbers = {name: number for number, name in enumerate(names)}
    swapped = [_swapped(name) for name in names]
    return [numbers.get(other, number) for number, other in enumerate(swapped)]


def _swapped(name: str) -> str:
    for one, other in (("left", "right"), ("right", "left")):
        if name.startswith(one):
            return other + name.removeprefix(one)
        if name.endswith(one):
            return name.removesuffix(one) + other
    return name


def fitting(width: int, height: int, size: int) -> Floats:
    """The affine map, (2, 3), that puts a (width, height) picture into the middle of a square, as large as fits."""
    scale = size / max(width, height)
    return np.array([[scale, 0.0, (size - scale * width) / 2], [0.0, scale, (size - scale * height) / 2]])


def drawn(moves: Moves, size: int) -> tuple[Floats, bool]:
    """A random affine map, (2, 3), of the square onto itself, about its middle; and whether it mirrors."""
    scale, turn = random.uniform(*moves.scale), math.radians(random.uniform(-moves.rotation, moves.rotation))
    right, down = (random.uniform(-moves.shift, moves.shift) * size for _ in range(2))
    mirrored = random.random() < moves.flip
    cosine, sine = scale * math.cos(turn), scale * math.sin(turn)
    turned = np.array([[cosine, -sine], [sine, cosine]])
    if mirrored:
        turned[:, 0] *= -1
    middle, aside = np.array([size / 2, size / 2]), np.array([right, down])
    return np.concatenate([turned, (middle + aside - turned @ middle)[:, None]], axis=1), mirrored


def after(first: Floats, second: Floats) -> Floats:
    """The (2, 3) map that does ``first``, then ``second``."""
    whole: Floats = second @ np.concatenate([first, [[0.0, 0.0, 1.0]]])
    return whole


def moved(points: Floats, transform: Floats, size: int) -> Floats:
    """(m, k, 3) points under the map; those outside of the square are not visible any more."""
    places = points[..., :2] @ transform[:, :2].T + transform[:, 2]
    inside = ((places >= 0) & (places < size)).all(axis=-1)
    visible = points[..., 2] * inside
    return np.concatenate([places * (visible > 0)[..., None], visible[..., None]], axis=-1)


class Views:
    """Samples for training and tests: what a network of ``size`` pixels sees of the scenes.

    A sample is (image, points, sizes, known): (3, size, size) bytes; (``most``, k, 3), absent instances all zero;
    (``most``,) square roots of the instances' areas; (size / stride, size / stride) bytes, 0 in cells that are not
    annotated. Instances beyond ``most`` are left out, the smallest first, and their places are unknown.
    """

    def __init__(self, scenes: Scenes, *, size: int, stride: int, most: int, moves: Moves | None = None) -> None:
        self.scenes, self._size, self._stride, self._most = scenes, size, stride, most
        self._moves = moves
        self._mirror = mirror_order(scenes.names)
        self.deterministic = moves is None
        """Whether no random numbers are drawn."""
        self.generators = ("random",)

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scene = self.scenes.scene(index)
        transform, mirrored = fitting(scene.image.width, scene.image.height, self._size), False
        if self._moves is not None:
            move, mirrored = drawn(self._moves, self._size)
            transform = after(transform, move)
        kept, left_out = self._largest(scene)
        points = scene.points[kept][:, self._mirror] if mirrored else scene.points[kept]
        seen = moved(points, transform, self._size)
        sizes = np.sqrt(scene.areas[kept] * abs(np.linalg.det(transform[:, :2])))
        surplus = [around(scene.points[each], np.sqrt(scene.areas[each]) / 2) for each in left_out]
        unknown = [*scene.unknown, *surplus]
        known = self._known(scene.image.size, unknown, transform)
        image = warped(scene.image, transform, self._size)
        return as_bytes(image), self._padded(seen), self._padded(np.maximum(sizes, 1.0)), known

    def _largest(self, scene: Scene) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(-scene.areas, kind="stable")
        return order[: self._most], order[self._most :]

    def _padded(self, values: Floats) -> Tensor:
        rows = torch.zeros(self._most, *values.shape[1:])
        rows[: len(values)] = torch.from_numpy(values).float()
        return rows

    def _known(self, size: tuple[int, int], unknown: Sequence[Floats], transform: Floats) -> Tensor:
        cells = self._size // self._stride
        if not unknown:
            return torch.ones(cells, cells, dtype=torch.uint8)
        mask = Image.new("L", size, 1)
        for left, top, right, bottom in unknown:
            ImageDraw.Draw(mask).rectangle((left, top, right, bottom), fill=0)
        seen = warped(mask, transform / self._stride, cells, fill=1, resample=Image.Resampling.NEAREST)
        return torch.from_numpy(np.array(seen, dtype=np.uint8))


def warped(
    image: Image.Image,
    transform: Floats,
    size: int,
    *,
    fill: int = 0,
    resample: Image.Resampling = Image.Resampling.BILINEAR,
) -> Image.Image:
    """The (size, size) picture that the map makes of ``image``."""
    back = np.linalg.inv(np.concatenate([transform, [[0.0, 0.0, 1.0]]]))[:2]
    coefficients = tuple(map(float, back.ravel()))
    colour = fill if image.mode == "L" else (fill, fill, fill)
    return image.transform((size, size), Image.Transform.AFFINE, coefficients, resample=resample, fillcolor=colour)


def around(points: Floats, margin: float) -> Floats:
    """The box, (4,), around the visible ones of (k, 3) points, ``margin`` wider on each side; at least one is."""
    places = points[points[:, 2] > 0, :2]
    return np.concatenate([places.min(0) - margin, places.max(0) + margin])
