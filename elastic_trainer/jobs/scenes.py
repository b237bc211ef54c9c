"""Pictures with key points, as they are stored and as a network sees them: scaled, turned, moved, perhaps mirrored.

They come from COCO's annotation files (https://cocodataset.org/#format-data), or are drawn on demand: one to three real
digits, with key points that follow from their strokes. Random numbers come from Python's generator, which the session
keys by (seed, epoch, sample). Points are (x, y, visible) in pixels, the middle of the first pixel being (0.5, 0.5).

*Fails by* DataError, with one sentence that names the file and the entry; SampleError for an image that cannot be read.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from elastic_trainer.errors import DataError
from elastic_trainer.jobs.digits import Digits
from elastic_trainer.jobs.images import as_bytes, read_image
from elastic_trainer.jobs.pillow import Image, ImageDraw

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
        self.scenes, self._size, self._stride, self._most, self._moves = scenes, size, stride, most, moves
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
        order = np.argsort(-scene.areas, kind="stable")
        kept, left_out = order[: self._most], order[self._most :]
        points = scene.points[kept][:, self._mirror] if mirrored else scene.points[kept]
        seen = moved(points, transform, self._size)
        sizes = np.sqrt(scene.areas[kept] * abs(np.linalg.det(transform[:, :2])))
        surplus = [around(scene.points[each], np.sqrt(scene.areas[each]) / 2) for each in left_out]
        known = self._known(scene.image.size, [*scene.unknown, *surplus], transform)
        image = warped(scene.image, transform, self._size)
        return as_bytes(image), self._padded(seen), self._padded(np.maximum(sizes, 1.0)), known

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
        draws = np.random.Generator(np.random.PCG64((_PURPOSE, self._seed, index)))
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
        touched = (
            all(box[side] < other[side + 2] + _APART and other[side] < box[side + 2] + _APART for side in (0, 1))
            for other in taken
        )
        if not any(touched):
            return box
    return None


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


class _Entry(BaseModel):
    """One object of the file; what is not needed here is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CocoImage(_Entry):
    """A picture."""

    id: int
    file_name: str = Field(min_length=1)


class CocoCategory(_Entry):
    """A kind of thing, and the names of its key points."""

    id: int
    name: str
    keypoints: tuple[str, ...] = ()


class CocoAnnotation(_Entry):
    """One thing in a picture, or (``iscrowd``) many of them together. ``bbox``: left, top, width, height."""

    image_id: int
    category_id: int
    bbox: tuple[float, float, Annotated[float, Field(ge=0.0)], Annotated[float, Field(ge=0.0)]]
    keypoints: tuple[float, ...] = ()
    area: float | None = Field(default=None, ge=0.0)
    iscrowd: bool = False

    @property
    def points(self) -> Floats:
        """(k, 3). The file counts from 0 at the middle of the first pixel; labelled but hidden points count too."""
        table = np.array(self.keypoints, dtype=np.float64).reshape(-1, 3)
        known = (table[:, 2:] > 0).astype(np.float64)
        return np.concatenate([(table[:, :2] + 0.5) * known, known], axis=1)

    @property
    def size(self) -> float:
        """Its area in pixels, at least one."""
        return max(1.0, self.area if self.area is not None else self.bbox[2] * self.bbox[3])

    @property
    def box(self) -> Floats:
        left, top, width, height = self.bbox
        return np.array([left, top, left + width, top + height])


class CocoFile(_Entry):
    """An annotation file."""

    categories: tuple[CocoCategory, ...]
    images: tuple[CocoImage, ...]
    annotations: tuple[CocoAnnotation, ...]


class CocoScenes:
    """The pictures of an annotation file whose things of ``category`` have key points.

    ``category`` None: the only one that has some. With ``empty`` pictures without any labelled point are there too.
    The boxes of crowds, and of things without a single labelled point, are unknown.
    """

    def __init__(self, annotations: Path, images: Path, category: str | None = None, *, empty: bool = False) -> None:
        content = read_annotations(annotations)
        chosen = _category(annotations, content.categories, category)
        self.names: Sequence[str] = chosen.keypoints
        pictures = {each.id: each for each in content.images}
        things: dict[int, list[CocoAnnotation]] = defaultdict(list)
        for number, each in enumerate(content.annotations):
            if each.category_id == chosen.id:
                _check(annotations, number, each, pictures, len(self.names))
                things[each.image_id].append(each)
        self._root, self._things = images, things
        self._pictures = [each for each in pictures.values() if empty or any(map(_labelled, things[each.id]))]
        if not self._pictures:
            raise DataError(f"{annotations}: no picture with key points of {chosen.name!r}", hint="give other files")
        _check_files(images, self._pictures)

    def __len__(self) -> int:
        return len(self._pictures)

    def scene(self, index: int) -> Scene:
        picture = self._pictures[index]
        things = self._things.get(picture.id, [])
        known = [each for each in things if _labelled(each)]
        unknown = [each.box for each in things if not _labelled(each)]
        return Scene(
            read_image(self._root / picture.file_name),
            np.array([each.points for each in known]).reshape(-1, len(self.names), 3),
            np.array([each.size for each in known]),
            np.array(unknown).reshape(-1, 4),
        )


def _labelled(thing: CocoAnnotation) -> bool:
    return not thing.iscrowd and bool((thing.points[:, 2] > 0).any())


def read_annotations(path: Path) -> CocoFile:
    """What is in the file; DataError for what is no COCO file with key points."""
    try:
        return CocoFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", hint="set data.annotations to a COCO file") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        if first["type"] == "json_invalid":
            what = f"not valid JSON: {first['ctx']['error']}"
        elif not place:
            what = f"a {type(first['input']).__name__} instead of an object"
        elif first["type"] == "missing":
            what = f"{place if '[' in place else repr(place)} is missing"
        else:
            what = f"{place} is wrong: {first['msg']}"
        raise DataError(f"{path}: {what}", hint="give a COCO annotation file with key points") from error


def _category(path: Path, categories: Sequence[CocoCategory], wanted: str | None) -> CocoCategory:
    able = [each for each in categories if each.keypoints]
    names = ", ".join(repr(each.name) for each in able) or "none"
    chosen = [each for each in able if wanted in (None, each.name)]
    if len(chosen) == 1:
        return chosen[0]
    if wanted is None:
        what = "several categories have" if chosen else "no category has"
        raise DataError(f"{path}: {what} 'keypoints' (those that have: {names})", hint="set data.category")
    raise DataError(f"{path}: there is no category {wanted!r} with 'keypoints'", hint=f"those that have: {names}")


def _check(path: Path, number: int, thing: CocoAnnotation, pictures: Mapping[int, CocoImage], points: int) -> None:
    if thing.image_id not in pictures:
        raise DataError(
            f"{path}: annotations[{number}] is of image {thing.image_id}, which is not in the file",
            hint="correct the file",
        )
    if len(thing.keypoints) not in (0, 3 * points):
        raise DataError(
            f"{path}: annotations[{number}].keypoints has {len(thing.keypoints)} numbers instead of {3 * points}",
            hint="the category's key points need x, y and visibility each",
        )


def _check_files(root: Path, pictures: Sequence[CocoImage]) -> None:
    """Look for all files in one go, before the first of them is needed."""
    present: dict[Path, set[str]] = {}
    for picture in pictures:
        path = root / picture.file_name
        if path.parent not in present:
            try:
                present[path.parent] = set(os.listdir(path.parent))
            except OSError as error:
                raise DataError(f"{path.parent}: {error.strerror or error}", hint="set data.images") from error
        if path.name not in present[path.parent]:
            raise DataError(f"{path}: there is no such image file", hint="complete data.images, or set another one")
