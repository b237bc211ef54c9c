"""Key points in COCO's annotation files: https://cocodataset.org/#format-data.

*Fails by* DataError, with one sentence that names the file and the entry; SampleError for an image that cannot be read.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elastic_trainer.errors import DataError
from elastic_trainer.tasks.pose.scenes import Floats, Scene
from elastic_trainer.tasks.vision.image_files import read_image

EntryT = TypeVar("EntryT", bound=BaseModel)


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


class CocoScenes:
    """The pictures of an annotation file whose things of ``category`` have key points.

    ``category`` None: the only one that has some. With ``empty`` pictures without any labelled point are there too.
    The boxes of crowds, and of things without a single labelled point, are unknown.
    """

    def __init__(self, annotations: Path, images: Path, category: str | None = None, *, empty: bool = False) -> None:
        content = _read(annotations)
        chosen = _category(annotations, _entries(annotations, content, "categories", CocoCategory), category)
        self.names: Sequence[str] = chosen.keypoints
        pictures = {each.id: each for each in _entries(annotations, content, "images", CocoImage)}
        things: dict[int, list[CocoAnnotation]] = defaultdict(list)
        for number, each in enumerate(_entries(annotations, content, "annotations", CocoAnnotation)):
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


def _read(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", hint="set data.annotations to a COCO file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}", hint="give a COCO annotation file") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: a {type(content).__name__} instead of an object", hint="give a COCO annotation file")
    return content


def _entries(path: Path, content: Mapping[str, object], name: str, kind: type[EntryT]) -> list[EntryT]:
    """The list ``name`` of the file, checked."""
    if name not in content:
        raise DataError(f"{path}: '{name}' is missing", hint="give a COCO annotation file with key points")
    try:
        return TypeAdapter(list[kind]).validate_python(content[name])  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        what = "is missing" if first["type"] == "missing" else f"is wrong: {first['msg']}"
        raise DataError(f"{path}: {place} {what}", hint="correct the file") from error


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
