"""Images in folders, one folder for each class, and what a network sees of one: a random part, in a test its middle.

Random numbers come from Python's generator, which the session keys by (seed, epoch, sample): the same image looks the
same on whatever rank it is drawn, and after a restart.

*Fails by* DataError for folders that hold no data set, SampleError for an image that cannot be read (StorageReadError
where that is the storage's fault).
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.errors import DataError, SampleError, StorageReadError
from elastic_trainer.jobs.config import listed
from elastic_trainer.jobs.pillow import Image, ImageEnhance, UnidentifiedImageError

_TRIES = 10
_BILINEAR = Image.Resampling.BILINEAR

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


@dataclass(frozen=True, slots=True)
class RandomView:
    """A random part of the image, resized to ``size``, perhaps mirrored, its colours changed.

    The part has ``scale`` of the image's area and sides of ``ratio`` (Szegedy et al., 2014,
    https://arxiv.org/abs/1409.4842, section 6); ``jitter`` is how far brightness, contrast and saturation may move.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __call__(self, image: Image.Image) -> Tensor:
        box = random_box(image.width, image.height, self.scale, self.ratio)
        seen = image.resize((self.size, self.size), _BILINEAR, box=box)
        if random.random() < self.flip:
            seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return as_bytes(jittered(seen, self.jitter))


@dataclass(frozen=True, slots=True)
class CentralView:
    """The image with its shorter side resized to ``resize``, and of that the central square of ``size``."""

    size: int
    resize: int

    def __call__(self, image: Image.Image) -> Tensor:
        side = min(image.width, image.height) * self.size / self.resize
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        return as_bytes(image.resize((self.size, self.size), _BILINEAR, box=box))


def random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """A part of a (width, height) image; where no draw fits into it, the largest central one of an allowed shape."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(*scale)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        across, down = math.sqrt(area * shape), math.sqrt(area / shape)
        if across <= width and down <= height:
            left, top = random.uniform(0, width - across), random.uniform(0, height - down)
            return left, top, min(width, left + across), min(height, top + down)
    across, down = min(width, height * ratio[1]), min(height, width / ratio[0])
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down


def jittered(image: Image.Image, jitter: tuple[float, float, float]) -> Image.Image:
    """Brightness, contrast and saturation each times a factor within 1 +- its ``jitter``, in random order."""
    if not any(jitter):
        return image
    kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    changes = list(zip(kinds, jitter, strict=True))
    random.shuffle(changes)
    for kind, most in changes:
        image = kind(image).enhance(random.uniform(max(0.0, 1.0 - most), 1.0 + most))
    return image


def as_bytes(image: Image.Image) -> Tensor:
    """(3, height, width) bytes of an RGB image: a quarter of what floats would take on the way to a device."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def normalized(images: Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]) -> Tensor:
    """(n, 3, h, w) bytes to floats; ``mean`` and ``std`` of each colour, white being 1."""
    centre, spread = (torch.tensor(each, device=images.device).view(1, 3, 1, 1) * 255.0 for each in (mean, std))
    return (images.float() - centre) / spread


EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """File ``i`` is ``paths[i]`` (relative to ``root``) and shows ``classes[labels[i]]``; sorted by class and name."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def thinned(self, count: int | None) -> ImageFiles:
        """At most ``count`` files, evenly spread: of each class about the same part."""
        if count is None or count >= len(self):
            return self
        kept = [place * len(self) // count for place in range(count)]
        paths, labels = tuple(self.paths[i] for i in kept), tuple(self.labels[i] for i in kept)
        return ImageFiles(self.root, self.classes, paths, labels)


def image_files(root: Path) -> ImageFiles:
    """What is in the class folders of ``root``: the classes are their sorted names, hidden ones and files aside."""
    classes = tuple(_names(root, folders=True))
    if not classes:
        raise DataError(f"{root}: holds no class folders", hint="put the images of each class into a folder of its own")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = [file for file in _names(root / name, folders=False) if Path(file).suffix.lower() in EXTENSIONS]
        if not inside:
            known = ", ".join(sorted(EXTENSIONS))
            raise DataError(f"{root / name}: a class without images", hint=f"add some ({known}), or remove the folder")
        paths += [f"{name}/{file}" for file in inside]
        labels += [label] * len(inside)
    return ImageFiles(root, classes, tuple(paths), tuple(labels))


def _names(directory: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(each.name for each in entries if each.is_dir() == folders and not each.name.startswith("."))
    except OSError as error:
        hint = "name a directory with class folders"
        raise DataError(f"{directory}: {error.strerror or error}", hint=hint) from error


def check_same_classes(train: ImageFiles, test: ImageFiles) -> None:
    """Raise DataError unless both have the same classes: a number must mean the same in both."""
    for one, other in ((train, test), (test, train)):
        lacking = [name for name in one.classes if name not in other.classes]
        if lacking:
            what = f"{'classes' if len(lacking) > 1 else 'class'} {listed(lacking)}"
            raise DataError(f"{other.root} lacks {what} of {one.root}", hint="both need the same class folders")


def read_image(path: Path) -> Image.Image:
    """The image in ``path`` in RGB, all of it decoded."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise SampleError(f"{path}: not an image", hint="repair or remove it, or say bad_samples=skip") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise StorageReadError(f"{path}: cannot be read: {reason}", hint="look at the storage") from error
        raise SampleError(
            f"{path}: cannot be read as an image: {reason}", hint="repair or remove it, or say bad_samples=skip"
        ) from error


class ImageFolder:
    """Samples (image, label): what ``view`` makes of the image, and the number of its class."""

    def __init__(self, files: ImageFiles, view: Callable[[Image.Image], Tensor], *, deterministic: bool) -> None:
        self.files, self._view = files, view
        self.deterministic = deterministic
        """Whether the view draws no random numbers."""
        self.generators = ("random",)
        """Those that a view may draw from."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_image(self.files.root / self.files.paths[index])
        return self._view(image), self.files.labels[index]
