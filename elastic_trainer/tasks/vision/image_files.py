"""Images in folders, one folder for each class, and reading a single one.

*Fails by* DataError for folders that hold no data set, SampleError for an image that cannot be read (StorageReadError
where that is the storage's fault).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from elastic_trainer.errors import DataError, SampleError, StorageReadError
from elastic_trainer.tasks.vision.pillow import Image, UnidentifiedImageError

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
    classes = tuple(sorted(_names(root, folders=True)))
    if not classes:
        raise DataError(f"{root}: holds no class folders", hint="put the images of each class into a folder of its own")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = sorted(file for file in _names(root / name, folders=False) if Path(file).suffix.lower() in EXTENSIONS)
        if not inside:
            known = ", ".join(sorted(EXTENSIONS))
            raise DataError(f"{root / name}: a class without images", hint=f"add some ({known}), or remove the folder")
        paths += [f"{name}/{file}" for file in inside]
        labels += [label] * len(inside)
    return ImageFiles(root, classes, tuple(paths), tuple(labels))


def _names(directory: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [each.name for each in entries if each.is_dir() == folders and not each.name.startswith(".")]
    except OSError as error:
        raise DataError(
            f"{directory}: {error.strerror or error}", hint="name a directory with class folders"
        ) from error


def check_same_classes(train: ImageFiles, test: ImageFiles) -> None:
    """Raise DataError unless both have the same classes: a number must mean the same in both."""
    for one, other in ((train, test), (test, train)):
        lacking = [name for name in one.classes if name not in other.classes]
        if lacking:
            raise DataError(
                f"{other.root} lacks {_listed(lacking)} of {one.root}", hint="both need the same class folders"
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{'classes' if len(names) > 1 else 'class'} {', '.join(map(repr, names[:5]))}{more}"


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
