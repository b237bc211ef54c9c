"""Key points of all things in a picture at once, from a multi-resolution network; out of the box, those of digits.

Pictures come from COCO's annotation files (https://cocodataset.org/#format-data), or are drawn on demand: one to three
real digits, with key points that follow from their strokes. The network sees them scaled, turned, moved, perhaps
mirrored. Random numbers come from Python's generator, which the session keys by (seed, epoch, sample).

Bottom-up: heat maps say where points are, tags, which are alike within an instance, which of them belong together
(Newell, Huang, Deng, "Associative Embedding", 2016, https://arxiv.org/abs/1611.05424; grouping takes the closest pair
first instead of an optimal assignment). The network keeps high resolution: parallel branches, each at half the
resolution of the one before, fused often (Sun et al., 2019, https://arxiv.org/abs/1902.09212; with a map of tags beside
each heat map as in Cheng et al., 2019, https://arxiv.org/abs/1908.10357). Blocks are those of the residual networks.

Shapes: n pictures, m instances, k kinds of points, maps of h by w. A point is (x, y, visible) in pixels of the picture,
the middle of the first pixel being (0.5, 0.5); a cell of the map covers ``stride`` pixels. Nothing here knows of ranks
or devices. The names of the points belong to the identity of the run, since the network knows them by number.

*Fails by* DataError, with one sentence that names the file and the entry; SampleError for an image that cannot be read.
"""

from __future__ import annotations

import colorsys
import json
import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer import Batch
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.digits import Digits, shipped_digits, split
from elastic_trainer.jobs.imagefolder import BasicBlock, as_bytes, normalized, read_image
from elastic_trainer.jobs.pillow import Image, ImageDraw
from elastic_trainer.jobs.task import Datasets, Exhibits, Task

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


def mirror_order(names: Sequence[str]) -> list[int]:
    """Which point each one is in a mirrored picture: ``left...`` and ``right...`` change places."""
    numbers = {name: number for number, name in enumerate(names)}
    other = {"left": "right", "right": "left"}
    swapped = [re.sub("^(left|right)|(left|right)$", lambda side: other[side[0]], name, count=1) for name in names]
    return [numbers.get(name, number) for number, name in enumerate(swapped)]


def fitting(width: int, height: int, size: int) -> Floats:
    """The affine map, (3, 3), that puts a (width, height) picture into the middle of a square, as large as fits."""
    scale = size / max(width, height)
    right, down = (size - scale * width) / 2, (size - scale * height) / 2
    return np.array([[scale, 0.0, right], [0.0, scale, down], [0.0, 0.0, 1.0]])


def drawn(options: KeypointsData) -> tuple[Floats, bool]:
    """A random affine map, (3, 3), of the square onto itself, about its middle; and whether it mirrors."""
    scale, turn = random.uniform(*options.scale), math.radians(random.uniform(-options.rotation, options.rotation))
    right, down = (random.uniform(-options.shift, options.shift) * options.size for _ in range(2))
    mirrored = random.random() < options.flip
    cosine, sine = scale * math.cos(turn), scale * math.sin(turn)
    side, half = -1.0 if mirrored else 1.0, options.size / 2
    turned = np.array([[side * cosine, -sine, half + right], [side * sine, cosine, half + down], [0.0, 0.0, 1.0]])
    return turned @ np.array([[1.0, 0.0, -half], [0.0, 1.0, -half], [0.0, 0.0, 1.0]]), mirrored


def moved(points: Floats, transform: Floats, size: int) -> Floats:
    """(m, k, 3) points under the map; those outside of the square are not visible any more."""
    moved = points[..., :2] @ transform[:2, :2].T + transform[:2, 2]
    inside = ((moved >= 0) & (moved < size)).all(axis=-1)
    visible = points[..., 2] * inside
    return np.concatenate([moved * (visible > 0)[..., None], visible[..., None]], axis=-1)


class Views:
    """Samples for training and tests: what a network of ``options.size`` pixels sees of the scenes, ``moving`` or not.

    A sample is (image, points, sizes, known): (3, size, size) bytes; (``most``, k, 3), absent instances all zero;
    (``most``,) square roots of the instances' areas; (size / stride, size / stride) bytes, 0 in cells that are not
    annotated. Instances beyond ``most`` are left out, the smallest first, and their positions are unknown.
    """

    def __init__(self, scenes: Scenes, options: KeypointsData, stride: int, *, moving: bool = False) -> None:
        self._scenes, self._options, self._stride, self._moving = scenes, options, stride, moving
        self._mirror = mirror_order(scenes.names)
        self.deterministic = not moving
        """Whether no random numbers are drawn."""
        self.generators = ("random",)

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scene, size, most = self._scenes.scene(index), self._options.size, self._options.most
        transform, mirrored = fitting(scene.image.width, scene.image.height, size), False
        if self._moving:
            move, mirrored = drawn(self._options)
            transform = move @ transform
        order = np.argsort(-scene.areas, kind="stable")
        kept, left_out = order[:most], order[most:]
        points = scene.points[kept][:, self._mirror] if mirrored else scene.points[kept]
        sizes = np.sqrt(scene.areas[kept] * abs(np.linalg.det(transform[:2, :2])))
        surplus = [around(scene.points[each], np.sqrt(scene.areas[each]) / 2) for each in left_out]
        known = self._known(scene.image.size, [*scene.unknown, *surplus], transform)
        image = scene.image.transform((size, size), Image.Transform.AFFINE, _back(transform), Image.Resampling.BILINEAR)
        seen, large = moved(points, transform, size), np.maximum(sizes, 1.0)
        return as_bytes(image), self._padded(seen), self._padded(large), known

    def _padded(self, values: Floats) -> Tensor:
        rows = torch.zeros(self._options.most, *values.shape[1:])
        rows[: len(values)] = torch.from_numpy(values).float()
        return rows

    def _known(self, size: tuple[int, int], unknown: Sequence[Floats], transform: Floats) -> Tensor:
        cells = self._options.size // self._stride
        if not unknown:
            return torch.ones(cells, cells, dtype=torch.uint8)
        mask = Image.new("L", size, 1)
        for left, top, right, bottom in unknown:
            ImageDraw.Draw(mask).rectangle((left, top, right, bottom), fill=0)
        to_cells = np.diag([1 / self._stride, 1 / self._stride, 1.0]) @ transform
        seen = mask.transform((cells, cells), Image.Transform.AFFINE, _back(to_cells), fillcolor=1)
        return torch.from_numpy(np.array(seen, dtype=np.uint8))


def _back(transform: Floats) -> list[float]:
    """The inverse map, as Pillow takes it."""
    coefficients: list[float] = np.linalg.inv(transform)[:2].ravel().tolist()
    return coefficients


def around(points: Floats, margin: float) -> Floats:
    """The box, (4,), around the visible ones of (k, 3) points, ``margin`` wider on each side; at least one is."""
    shown = points[points[:, 2] > 0, :2]
    return np.concatenate([shown.min(0) - margin, shown.max(0) + margin])


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
            left, top, right, bottom = ink = Image.fromarray(image).getbbox() or (0, 0, 0, 0)
            box = _free_box(draws, ink, taken)
            if box is None:
                continue  # no room beside the others
            taken.append(box)
            canvas[box[1] : box[3], box[0] : box[2]] |= image[top:bottom, left:right]
            points.append(stroke_points(image) + np.array([box[0] - left, box[1] - top, 0.0]))
            areas.append(float((right - left) * (bottom - top)))
        return Scene(Image.fromarray(canvas).convert("RGB"), np.array(points), np.array(areas), np.zeros((0, 4)))


def _free_box(draws: np.random.Generator, ink: Box, taken: Sequence[Box]) -> Box | None:
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
        return CocoFile.model_validate(json.loads(path.read_bytes()))  # which knows UTF-16 and byte-order marks
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", hint="set data.annotations to a COCO file") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        if not field:
            what = f"a {type(first['input']).__name__} instead of an object"
        elif first["type"] == "missing":
            what = f"{field if '[' in field else repr(field)} is missing"
        else:
            what = f"{field} is wrong: {first['msg']}"
        hint = "correct the file" if "[" in field else "give a COCO annotation file with key points"
        raise DataError(f"{path}: {what}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        hint = "give a COCO annotation file with key points"
        raise DataError(f"{path}: not valid JSON: {error}", hint=hint) from error


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


def on_map(points: Tensor, stride: int) -> Tensor:
    """Places of (..., 3) points in cells, (..., 2): the middle of the first cell is (0, 0)."""
    return points[..., :2] / stride - 0.5


def targets(points: Tensor, shape: tuple[int, int], stride: int, sigma: float) -> Tensor:
    """(n, k, h, w): at each visible one of the (n, m, k, 3) ``points`` a Gaussian of ``sigma`` cells, peaks of 1.

    Where two come together, the larger value counts.
    """
    centres = on_map(points, stride)
    rows = torch.arange(shape[0], device=points.device, dtype=points.dtype)
    columns = torch.arange(shape[1], device=points.device, dtype=points.dtype)
    across = torch.exp(-((columns - centres[..., :1]) ** 2) / (2 * sigma**2))
    down = torch.exp(-((rows - centres[..., 1:]) ** 2) / (2 * sigma**2)) * (points[..., 2:] > 0)
    maps = points.new_zeros(len(points), points.shape[2], *shape)
    for instance in range(points.shape[1]):  # not all at once: COCO has up to 30 of them
        one = down[:, instance, :, :, None] * across[:, instance, :, None, :]
        maps = torch.maximum(maps, one)
    return maps


def heat_losses(heat: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    """(n,): for each picture the mean squared difference over the cells in which ``mask``, (n, h, w), is 1."""
    squared = (heat - wanted) ** 2 * mask[:, None]
    cells = mask.sum(dim=(1, 2)).clamp(min=1.0) * heat.shape[1]
    return squared.sum(dim=(1, 2, 3)) / cells


def tags_at(tags: Tensor, points: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The tags, (n, m, k), at the cells of the points, and which of these, (n, m, k), are visible and on the map."""
    height, width = tags.shape[-2:]
    cells = on_map(points, stride).round().long()
    column, row = cells[..., 0], cells[..., 1]
    known = (points[..., 2] > 0) & (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    flat = tags.flatten(2)  # (n, k, h * w)
    return flat.gather(2, index.transpose(1, 2)).transpose(1, 2), known


def tag_losses(tags: Tensor, points: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """(n,) and (n,): how unlike the tags within instances are, and how alike those of different instances.

    The first is the mean over instances of the variance of their tags; the second the mean over pairs of instances of
    exp(-d**2 / 2), d being the distance of their mean tags. Pictures with too few instances have 0.
    """
    found, known = tags_at(tags, points, stride)
    weight = known.to(found.dtype)
    count = weight.sum(2)  # (n, m)
    mean = (found * weight).sum(2) / count.clamp(min=1.0)
    within = ((found - mean[..., None]) ** 2 * weight).sum(2) / count.clamp(min=1.0)
    present = (count > 0).to(found.dtype)
    instances = present.sum(1)
    pull = (within * present).sum(1) / instances.clamp(min=1.0)
    alike = torch.exp(-((mean[:, :, None] - mean[:, None, :]) ** 2) / 2)
    pairs = present[:, :, None] * present[:, None, :] * (1.0 - torch.eye(points.shape[1], device=points.device))
    push = (alike * pairs).sum(dim=(1, 2)) / (instances * (instances - 1.0)).clamp(min=1.0)
    return pull, push


@dataclass(frozen=True, slots=True)
class Peak:
    """A point that may be a key point: in pixels of the picture, its height in the heat map, its tag."""

    x: float
    y: float
    score: float
    tag: float


Instance = dict[int, Peak]
"""One thing in the picture: at most one peak for each kind of point, by its number."""


def find_peaks(heat: Tensor, tags: Tensor, stride: int, *, threshold: float, most: int) -> list[list[list[Peak]]]:
    """For each of n pictures and k kinds of points the highest local maxima above ``threshold``, at most ``most``.

    ``heat`` and ``tags`` are (n, k, h, w); a maximum is the highest of its eight neighbours.
    """
    width = heat.shape[-1]
    highest = functional.max_pool2d(heat, 3, stride=1, padding=1, return_indices=True)[1].flatten(2)
    numbers = torch.arange(highest.shape[2], device=heat.device)
    # Of equal ones, which half precision makes, the first alone is the highest.
    candidates = torch.where(highest == numbers, heat.flatten(2), -torch.inf)
    scores, cells = candidates.topk(min(most, candidates.shape[2]))
    found = tags.flatten(2).gather(2, cells)
    padded = functional.pad(heat, (1, 1, 1, 1), mode="replicate")
    right, left = padded[..., 1:-1, 2:], padded[..., 1:-1, :-2]
    below, above = padded[..., 2:, 1:-1], padded[..., :-2, 1:-1]
    # A quarter of a cell towards the higher neighbour; nothing between equal ones.
    shift_x, shift_y = (
        0.25 * torch.sign(more - less).flatten(2).gather(2, cells) for more, less in ((right, left), (below, above))
    )
    x = (cells % width + shift_x + 0.5) * stride
    y = (cells.div(width, rounding_mode="floor") + shift_y + 0.5) * stride
    table = torch.stack([x, y, scores, found], dim=-1).cpu().tolist()
    return [[[Peak(*row) for row in rows if row[2] > threshold] for rows in kinds] for kinds in table]


def grouped(peaks: list[list[Peak]], closeness: float, least_points: int = 1) -> list[Instance]:
    """Instances out of the peaks of each kind of point, the best first; those of fewer than ``least_points`` not.

    One kind after the other: of all pairs of a peak and an instance whose tags differ by less than ``closeness`` the
    closest (in steps of 0.1, then the highest peak) comes first; peaks that are left begin instances of their own.
    """
    instances: list[Instance] = []
    for kind, candidates in enumerate(peaks):
        tags = [fmean(peak.tag for peak in instance.values()) for instance in instances]
        pairs = sorted(
            (round(abs(peak.tag - tag), 1), -peak.score, i, j)
            for i, peak in enumerate(candidates)
            for j, tag in enumerate(tags)
            if abs(peak.tag - tag) < closeness
        )
        joined = one_to_one((i, j) for _, _, i, j in pairs)
        for i, j in joined:
            instances[j][kind] = candidates[i]
        instances += [{kind: peak} for i, peak in enumerate(candidates) if i not in dict(joined)]
    kept = [instance for instance in instances if len(instance) >= least_points]
    return sorted(kept, key=lambda instance: -fmean(peak.score for peak in instance.values()))


def one_to_one(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of ``pairs``, in their order, each of whose two members no earlier one has."""
    left, right, kept = set[int](), set[int](), []
    for i, j in pairs:
        if i not in left and j not in right:
            left.add(i)
            right.add(j)
            kept.append((i, j))
    return kept


def ascending(costs: Floats) -> list[tuple[int, int]]:
    """Row and column of each finite one, the least first."""
    return sorted(((i, j) for i, j in np.argwhere(np.isfinite(costs)).tolist()), key=lambda pair: float(costs[pair]))


@dataclass(slots=True)
class Counts:
    """What adds up over pictures. ``points`` there are, ``hit`` by the instance that belongs to theirs; ``found``,
    ``invented`` and ``missed`` regardless of instances; the same of whole instances."""

    points: int = 0
    hit: int = 0
    found: int = 0
    invented: int = 0
    missed: int = 0
    instances_found: int = 0
    instances_invented: int = 0
    instances_missed: int = 0

    def ratios(self) -> dict[str, tuple[int, int]]:
        """Numerators and denominators, to be added up: the part of the points that their instance has (PCK), and the
        F1 scores of points whatever their instance, and of instances."""
        wrong, wrong_instances = self.invented + self.missed, self.instances_invented + self.instances_missed
        return {
            "pck": (self.hit, self.points),
            "point_f1": (2 * self.found, 2 * self.found + wrong),
            "instance_f1": (2 * self.instances_found, 2 * self.instances_found + wrong_instances),
        }


def judge(instances: list[Instance], truth: Floats, sizes: Floats, within: float, counts: Counts) -> None:
    """Add to ``counts`` how ``instances`` meet one picture's ``truth``, (m, k, 3).

    A point is met where the distance is at most ``within`` times the size of its instance, of ``sizes`` (m,). Each
    prediction meets one point at most and each point is met once, the closest pair first. An instance is found by the
    one that meets most of its points, if these are at least half of them.
    """
    kinds, visible = truth.shape[1], truth[:, :, 2] > 0
    predicted = np.full((len(instances), kinds, 2), np.inf)
    for number, instance in enumerate(instances):
        for kind, peak in instance.items():
            predicted[number, kind] = peak.x, peak.y
    distance = np.linalg.norm(predicted[:, None] - truth[None, :, :, :2], axis=-1) / sizes[None, :, None]
    near = np.where(visible & (distance <= within), distance, np.inf)  # (predicted, m, k)
    for kind in range(kinds):
        found = len(one_to_one(ascending(near[:, :, kind])))
        counts.found += found
        counts.invented += sum(kind in instance for instance in instances) - found
        counts.missed += int(visible[:, kind].sum()) - found
    hits, there = np.isfinite(near).sum(2), visible.sum(1)  # (predicted, m), (m,)
    matched = one_to_one(ascending(np.where(hits > 0, -hits, np.inf)))
    whole = sum(2 * int(hits[i, j]) >= int(there[j]) for i, j in matched)
    counts.points += int(there.sum())
    counts.hit += sum(int(hits[pair]) for pair in matched)
    counts.instances_found += whole
    counts.instances_invented += len(instances) - whole
    counts.instances_missed += int((there > 0).sum()) - whole


_ENLARGED_TO = 256
_TRUTH = (255, 255, 255)


def drawn_points(image: Tensor, points: Tensor, found: Sequence[Instance]) -> Tensor:
    """The (3, h, w) bytes of ``image``, enlarged where small, with the true ``points``, (m, k, 3), and those found."""
    factor = max(1, _ENLARGED_TO // image.shape[-1])
    large = image.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
    picture = Image.fromarray(np.ascontiguousarray(large.permute(1, 2, 0).numpy().astype(np.uint8)))
    draw = ImageDraw.Draw(picture)
    arm = max(2, picture.width // 64)
    for number, instance in enumerate(found):
        red, green, blue = colorsys.hsv_to_rgb(number / max(1, len(found)), 1.0, 1.0)
        colour = (int(255 * red), int(255 * green), int(255 * blue))
        for peak in instance.values():
            x, y = peak.x * factor, peak.y * factor
            draw.ellipse((x - arm, y - arm, x + arm, y + arm), fill=colour)
    for x, y, visible in torch.flatten(points, 0, 1).tolist():
        if visible > 0:
            x, y = x * factor, y * factor
            draw.line((x - arm, y, x + arm, y), fill=_TRUTH)
            draw.line((x, y - arm, x, y + arm), fill=_TRUTH)
    return as_bytes(picture)


Width = Annotated[int, Field(ge=1, le=1024)]

_HEAT_STD = 0.001
_TAG_SLOPES = (3.0, 5.0)
"""By how much a tag grows at first half the picture down, and to the right, where the network is given positions."""


class StageOptions(Section):
    """``modules`` times: ``blocks`` residual blocks in each of ``branches`` branches, then a fusion of them all."""

    branches: int = Field(ge=1)
    blocks: int = Field(ge=1)
    modules: int = Field(default=1, ge=1)


class HrnetOptions(Section):
    """``model:`` the network."""

    channels: tuple[Width, ...] = Field(
        default=(32, 64, 128, 256),
        min_length=1,
        description="of each branch; each has half the resolution of the one before",
    )
    stages: tuple[StageOptions, ...] = Field(
        description="each: branches, blocks of each branch, and modules that end in a fusion",
        default=(
            StageOptions(branches=1, blocks=4),
            StageOptions(branches=2, blocks=4),
            StageOptions(branches=3, blocks=4, modules=4),
            StageOptions(branches=4, blocks=4, modules=3),
        ),
        min_length=1,
    )
    stem_halvings: int = Field(default=2, ge=1, le=4, description="the heat map has size / 2 ** stem_halvings cells")
    coordinates: bool = Field(default=False, description="give the network the place of each pixel")

    @model_validator(mode="after")
    def _consistent(self) -> HrnetOptions:
        branches = [stage.branches for stage in self.stages]
        if branches != sorted(branches) or branches[-1] != len(self.channels):
            raise ValueError(f"branches {branches} must not fall and end with {len(self.channels)}, one per channel")
        return self

    @property
    def stride(self) -> int:
        """Pixels in each direction of a cell of the heat map."""
        return int(2**self.stem_halvings)


class Parallel(nn.ModuleList):
    """One module for each branch."""

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        return [module(branch) for module, branch in zip(self, branches, strict=True)]


class Fusion(nn.Module):
    """Each of the first ``targets`` branches becomes the sum of all, brought to its resolution; its shape stays.

    From lower resolution by a 1x1 convolution and upsampling, from higher by 3x3 convolutions of stride 2.
    """

    def __init__(self, channels: Sequence[int], targets: int) -> None:
        super().__init__()
        every = range(len(channels))
        self.paths = nn.ModuleList(
            Parallel(_path(channels, source, target) for source in every) for target in range(targets)
        )

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        fused = []
        for target, paths in zip(branches, self.paths, strict=False):
            arrived = paths(branches)
            size = target.shape[-2:]
            same = [x if x.shape[-2:] == size else functional.interpolate(x, size, mode="nearest") for x in arrived]
            fused.append(functional.relu(torch.stack(same).sum(0)))
        return fused


def _path(channels: Sequence[int], source: int, target: int) -> nn.Module:
    """From branch ``source`` to branch ``target``, up to the upsampling."""
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(
            nn.Conv2d(channels[source], channels[target], 1, bias=False), nn.BatchNorm2d(channels[target])
        )
    wide = channels[source]
    first = [layer for _ in range(target - source - 1) for layer in (*_halving(wide, wide), nn.ReLU())]
    return nn.Sequential(*first, *_halving(wide, channels[target]))


def _halving(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class HrnetStage(nn.Module):
    """New branches from the lowest resolution there is, then the modules of ``plan``.

    The ``last`` stage gives the highest resolution alone: DDP refuses parameters that have no part in the loss.
    """

    def __init__(self, channels: Sequence[int], present: int, plan: StageOptions, *, last: bool) -> None:
        super().__init__()
        self.begun = nn.ModuleList(
            nn.Sequential(*_halving(channels[branch - 1], channels[branch]), nn.ReLU())
            for branch in range(present, plan.branches)
        )
        mine = channels[: plan.branches]
        self.blocks = nn.ModuleList(
            Parallel(nn.Sequential(*(BasicBlock(width, width) for _ in range(plan.blocks))) for width in mine)
            for _ in range(plan.modules)
        )
        targets = [plan.branches] * (plan.modules - 1) + [1 if last else plan.branches]
        self.fusions = nn.ModuleList(Fusion(mine, each) for each in targets)

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        for begin in self.begun:
            branches = [*branches, begin(branches[-1])]
        for blocks, fusion in zip(self.blocks, self.fusions, strict=True):
            branches = fusion(blocks(branches))
        return branches


class HighResolutionNet(nn.Module):
    """(n, 3, h, w) to heat maps and tags, each (n, points, h / stride, w / stride).

    With ``coordinates`` the network gets the position of each pixel, and tags begin as the position. Without them
    similar things have similar tags, and the loss has no slope where all tags are the same.

    h and w must be multiples of stride * 2 ** (branches - 1).
    """

    def __init__(self, points: int, options: HrnetOptions) -> None:
        super().__init__()
        channels, coordinates = options.channels, options.coordinates
        self.coordinates = coordinates
        colours = 5 if coordinates else 3
        stem: list[nn.Module] = []
        for number in range(options.stem_halvings):
            stem += [*_halving(colours if number == 0 else channels[0], channels[0]), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        present = [1, *(stage.branches for stage in options.stages)]
        self.stages = nn.ModuleList(
            HrnetStage(channels, before, stage, last=number == len(options.stages))
            for number, (before, stage) in enumerate(zip(present, options.stages, strict=False), 1)
        )
        self.heat = nn.Conv2d(channels[0], points, 1)
        self.tags = nn.Conv2d(channels[0] + 2 * coordinates, points, 1)
        nn.init.normal_(self.heat.weight, std=_HEAT_STD)
        nn.init.zeros_(self.heat.bias)  # type: ignore[arg-type]
        if coordinates:
            with torch.no_grad():
                self.tags.weight[:, -2:, 0, 0] = torch.tensor(_TAG_SLOPES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        branches = [self.stem(with_coordinates(images) if self.coordinates else images)]
        for stage in self.stages:
            branches = stage(branches)
        finest = branches[0]
        return self.heat(finest), self.tags(with_coordinates(finest) if self.coordinates else finest)


def with_coordinates(images: Tensor) -> Tensor:
    """(n, c, h, w) to (n, c + 2, h, w): where each pixel is, from -1 to 1 down and to the right.

    Else things that look alike would have tags alike (Liu et al., 2018, https://arxiv.org/abs/1807.03247).
    """
    count, _, height, width = images.shape
    down = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)[:, None].expand(height, width)
    right = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype).expand(height, width)
    return torch.cat([images, torch.stack([down, right]).expand(count, 2, height, width)], dim=1)


Colour = tuple[float, float, float]
Positive = Annotated[float, Field(gt=0.0)]

_SHOWN = 4


class CocoFiles(Section):
    """A COCO annotation file, and the directory of the images it names."""

    annotations: Path
    images: Path


class KeypointsData(Section):
    """``data:`` where the pictures are, and how they are seen. Without ``train`` and ``test``: the shipped digits."""

    train: CocoFiles | None = Field(
        default=None, description="`annotations` (a COCO file) and `images` (its directory); null: digits"
    )
    test: CocoFiles | None = Field(default=None, description="the same, for testing; both or none")
    category: str | None = Field(default=None, description="null: the only one of the file that has key points")
    empty: bool = Field(default=False, description="train also on pictures without any key point")
    count: int = Field(default=2000, ge=1, description="pictures with digits to train on")
    test_count: int = Field(default=300, ge=1, description="pictures with digits to test on")
    size: int = Field(default=64, ge=16, description="pixels that the network sees in each direction")
    most: int = Field(default=30, ge=1, description="instances in a picture; of more the smallest are left out")
    scale: tuple[Positive, Positive] = Field(default=(1.0, 1.0), description="least and most zoom in training")
    rotation: float = Field(default=0.0, ge=0.0, le=180.0, description="degrees, either way, in training")
    shift: float = Field(default=0.0, ge=0.0, le=1.0, description="of the side, in each direction")
    flip: float = Field(default=0.0, ge=0.0, le=1.0, description="how often training pictures are mirrored")
    mean: Colour = Field(default=(0.485, 0.456, 0.406), description="subtracted from each channel")
    std: tuple[Positive, Positive, Positive] = Field(
        default=(0.229, 0.224, 0.225), description="each channel is divided by it"
    )

    @model_validator(mode="after")
    def _consistent(self) -> KeypointsData:
        if (self.train is None) != (self.test is None):
            raise ValueError("'train' and 'test' go together")
        if self.scale[0] > self.scale[1]:
            raise ValueError("'scale' is a least and a most")
        return self


class KeypointsOptions(Section):
    """``options:`` of the losses, of what counts as a peak, and of what counts as met."""

    sigma: float = Field(default=2.0, gt=0.0, description="of the Gaussians, in cells of the heat map")
    heat_weight: float = Field(default=1.0, gt=0.0, description="of the heat maps in the loss")
    pull_weight: float = Field(default=1e-3, ge=0.0, description="tags of one instance alike")
    push_weight: float = Field(default=1e-3, ge=0.0, description="tags of two instances apart")
    threshold: float = Field(default=0.1, gt=0.0, lt=1.0, description="of a peak in the heat map")
    closeness: float = Field(default=1.0, gt=0.0, description="of tags of one instance")
    least_points: int = Field(default=2, ge=1, description="of an instance; smaller ones are noise")
    within: float = Field(default=0.15, gt=0.0, description="a point is met so near, in sizes of its instance")


class Keypoints(Task):
    """Bottom-up key points."""

    Data = KeypointsData
    Model = HrnetOptions
    Options = KeypointsOptions

    def datasets(self) -> Datasets:
        options: KeypointsData = self.data_options
        train, test = scenes(options)
        self.names: Sequence[str] = train.names
        model: HrnetOptions = self.model_options
        least = model.stride * 2 ** (len(model.channels) - 1)
        if options.size % least:
            raise ConfigError(
                f"data.size {options.size} is not a multiple of {least}, which the network's branches need",
                hint=f"set data.size to {max(1, round(options.size / least)) * least}",
            )
        return Datasets(train=Views(train, options, model.stride, moving=True), test=Views(test, options, model.stride))

    def identity(self) -> Mapping[str, Any]:
        return {"points": self.names}

    def model(self) -> nn.Module:
        return HighResolutionNet(len(self.names), self.model_options)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(*self._maps(model, batch), batch)["loss"].mean()

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        heat, tags = self._maps(model, batch)
        losses = self._losses(heat, tags, batch)
        counts = Counts()
        _, points, sizes, _ = (part.cpu().double().numpy() for part in batch.data)
        for number, instances in enumerate(self._instances(heat, tags, batch)):
            present = (points[number, :, :, 2] > 0).any(axis=1)
            judge(instances, points[number, present], sizes[number, present], self.options.within, counts)
        sums = {name: (each.sum(), len(each)) for name, each in losses.items()}
        return {**sums, **counts.ratios()}

    def exhibits(self, model: nn.Module, batch: Batch) -> Exhibits:
        heat, tags = self._maps(model, batch)
        images, points, _, _ = (part.cpu() for part in batch.data)
        found = self._instances(heat, tags, batch)
        shown = range(min(_SHOWN, len(images)))
        return Exhibits(images={f"test {n}": drawn_points(images[n], points[n], found[n]) for n in shown})

    def _maps(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Heat maps and tags, (n, k, h, w) each."""
        heat, tags = model(normalized(batch.x, self.data_options.mean, self.data_options.std))
        return heat.float(), tags.float()

    def _losses(self, heat: Tensor, tags: Tensor, batch: Batch) -> dict[str, Tensor]:
        """By name, (n,): of each picture."""
        options: KeypointsOptions = self.options
        _, points, _, known = batch.data
        stride = self.model_options.stride
        wanted = targets(points, (heat.shape[2], heat.shape[3]), stride, options.sigma)
        heat_loss = heat_losses(heat, wanted, known.float())
        pull, push = tag_losses(tags, points, stride)
        whole = options.heat_weight * heat_loss + options.pull_weight * pull + options.push_weight * push
        return {"loss": whole, "heat_loss": heat_loss, "ae_loss": pull + push}

    def _instances(self, heat: Tensor, tags: Tensor, batch: Batch) -> list[list[Instance]]:
        """The instances found in each picture, outside of what is unknown."""
        options: KeypointsOptions = self.options
        visible = heat.detach() * batch.data[3][:, None]
        stride, most = self.model_options.stride, self.data_options.most
        peaks = find_peaks(visible, tags.detach(), stride, threshold=options.threshold, most=most)
        return [grouped(each, options.closeness, options.least_points) for each in peaks]


def scenes(options: KeypointsData) -> tuple[Scenes, Scenes]:
    """Pictures to train on and to test with: COCO's, or made of different digits."""
    if options.train is not None and options.test is not None:
        train = CocoScenes(**dict(options.train), category=options.category, empty=options.empty)
        test = CocoScenes(**dict(options.test), category=options.category)
        if list(train.names) != list(test.names):
            raise DataError(
                f"{options.test.annotations}: its key points are {', '.join(test.names)}, those of the training data "
                f"{', '.join(train.names)}",
                hint="both files need the same category",
            )
        return train, test
    ours, others = split(shipped_digits(), test_size=1000, seed=0)
    return DigitScenes(ours, options.count, seed=0), DigitScenes(others, options.test_count, seed=1)
