"""Samples in tar files (the webdataset convention) as a map-style data set: shuffled, resumed and divided exactly.

*Runs in* any process; each opens the files for itself.
*Owns* at most :data:`MOST_OPEN` file descriptors per process.
*Fails by* DataError for a shard or sample that cannot be read.
"""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.data.tar_index import TarIndex, cache_file, index_of, paths_of
from elastic_trainer.errors import ConfigError, DataError

MOST_OPEN = 32

Decoder = Callable[[bytes], Any]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _image(data: bytes) -> Any:
    """A Pillow image, or the bytes where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return data
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _class(data: bytes) -> int:
    return int(data)


DECODERS: Mapping[str, Decoder] = {
    "txt": _text,
    "cls": _class,
    "json": json.loads,
    "npy": _array,
    "png": _image,
    "jpg": _image,
    "jpeg": _image,
}
"""What is made of a file by the last part of its extension; other files stay bytes."""


class TarShards:
    """The samples of tar ``shards``: dicts of extension to decoded value, with the key as ``__key__``.

    ``shards`` are paths, or patterns such as ``train-{000..127}.tar`` and ``train-*.tar``. ``decode`` adds decoders by
    extension (``seg.png`` goes before ``png``), False leaves all values bytes. ``transform`` is applied to each sample.
    ``index``: True keeps what was learned of a shard beside it, a directory keeps it there, False nowhere.
    """

    def __init__(
        self,
        shards: Paths,
        *,
        decode: Mapping[str, Decoder] | bool = True,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        index: bool | str | os.PathLike[str] = False,
    ) -> None:
        self.paths = paths_of(shards)
        directory = None if isinstance(index, bool) else Path(index)
        if directory is not None and not os.path.isdir(directory):
            raise ConfigError(f"the directory {directory} for indexes is not there", hint="make it, or say index=True")
        self._indexes = [index_of(path, cache_file(path, directory) if index else None) for path in self.paths]
        self._ends = np.cumsum([len(each) for each in self._indexes])
        own = decode if isinstance(decode, Mapping) else {}
        self._decoders: dict[str, Decoder] = {} if decode is False else {**DECODERS, **own}
        self._transform = transform
        self.deterministic = transform is None and not own
        """Whether a sample is read without random numbers."""
        self._files = Files()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index, path = self._indexes[shard], self.paths[shard]
        sample = self._sample(path, index, number - int(self._ends[shard]) + len(index))
        return sample if self._transform is None else self._transform(sample)

    def _sample(self, path: Path, index: TarIndex, place: int) -> dict[str, Any]:
        key = index.key(place)
        sample: dict[str, Any] = {"__key__": key}
        for extension, offset, size in index.members(place):
            sample[extension] = self._decoded(path, key, extension, self._files.read(path, offset, size))
        return sample

    def _decoded(self, path: Path, key: str, extension: str, data: bytes) -> Any:
        decoder = self._decoders.get(extension) or self._decoders.get(extension.rpartition(".")[2])
        if decoder is None:
            return data
        try:
            return decoder(data)
        except Exception as error:
            raise DataError(
                f"{key}.{extension} in the shard {path} cannot be decoded: {type(error).__name__}: {error}",
                hint="repair it, or leave such samples out with bad_samples='skip'",
            ) from error


class Files:
    """Open files of this process, the least recently used of too many closed. Safe to fork and to pickle."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._process = os.getpid()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``. DataError if they are not there."""
        try:
            data = os.pread(self._descriptor(path), size, offset)
        except OSError as error:
            raise DataError(f"the shard {path} cannot be read: {error.strerror}", hint="check the storage") from error
        if len(data) != size:
            raise DataError(f"the shard {path} is shorter than it was", hint="start again after it was replaced")
        return data

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, path: Path) -> int:
        if self._process != os.getpid():
            self.close()  # this process's copies of its parent's
            self._process = os.getpid()
        found = self._open.get(path)
        if found is None:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            found = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return found

    def __reduce__(self) -> tuple[type[Files], tuple[()]]:
        return Files, ()

    def __del__(self) -> None:
        if self._process == os.getpid():
            self.close()
