"""Samples in tar files as a map-style data set: shuffled, resumed and divided exactly.

Files ``key.ext`` in a row with one key are a sample (the webdataset convention). The headers of a shard are read once;
an index of them can be kept in a small file, valid while the shard's size and time stay.

*Runs in* any process; each opens the files for itself. *Owns* at most :data:`MOST_OPEN` descriptors per process.
*Fails by* DataError for a shard that is missing, empty, compressed or cut off, and a sample that cannot be read. A
cache that cannot be read or written is only a loss of time.
*Invariant*: a cache file that is used is whole (it begins with its digest), and of the present state of its shard.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.telemetry.logs import logger

_DIGEST = 32
_VERSION = 2
_BLOCK = 512
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Member i is called ``extensions[kinds[i]]`` and lies at ``offsets[i]``, ``sizes[i]`` bytes long; sample k has the
    key ``keys[k]`` (encoded) and the members from ``starts[k]`` to ``starts[k + 1]``. About 100 bytes per sample.
    """

    keys: NDArray[np.bytes_]
    starts: NDArray[np.int64]
    extensions: NDArray[np.str_]
    kinds: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, sample: int) -> str:
        return bytes(self.keys[sample]).decode("utf-8", "surrogateescape")

    def members(self, sample: int) -> list[tuple[str, int, int]]:
        where = range(int(self.starts[sample]), int(self.starts[sample + 1]))
        return [(str(self.extensions[self.kinds[i]]), int(self.offsets[i]), int(self.sizes[i])) for i in where]


def paths_of(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that ``shards`` names: paths, ``{000..019}`` and ``{a,b}`` for several, ``*`` and ``?`` for any.

    DataError where a pattern fits nothing.
    """
    asked = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    found = [path for each in asked for text in braces(os.fspath(each)) for path in _matching(text)]
    if not found:
        raise DataError("no shards are named", hint="name at least one tar file")
    return found


def braces(text: str) -> list[str]:
    """``a{08..10}`` as a08, a09, a10, and ``{x,y}`` as x, y. Pure."""
    match = _RANGE.search(text)
    if match is None:
        return [text]
    first, last, names = match.groups()
    if names is not None:
        middles = names.split(",")
    else:
        middles = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [each for middle in middles for each in braces(text[: match.start()] + middle + text[match.end() :])]


def _matching(text: str) -> list[Path]:
    if not any(mark in text for mark in "*?["):
        return [Path(text)]
    path = Path(text)
    found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise DataError(f"no file fits {text}", hint="check the pattern of the shards")
    return found


def index_of(path: Path, cache: Path | None) -> TarIndex:
    """The index of the shard ``path``, from the file ``cache`` if that is up to date, and kept there."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error.strerror}", hint="check its path") from error
    made_from = np.array([_VERSION, status.st_size, status.st_mtime_ns], dtype=np.int64)
    index = _load(cache, made_from) if cache is not None else None
    if index is None:
        index = scan(path)
        if cache is not None:
            _save(index, cache, made_from)
    return index


def scan(path: Path) -> TarIndex:
    """Read the headers of the shard ``path``."""
    try:
        with tarfile.open(path, "r:") as tar:
            return _indexed(path, tar)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"the shard {path} is not a whole tar file: {error}", hint=_advice(path)) from None
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error.strerror or error}", hint="check its path") from error


def _indexed(path: Path, tar: tarfile.TarFile) -> TarIndex:
    keys: list[str] = []
    starts: list[int] = []
    extensions: list[str] = []
    extents: list[tuple[int, int]] = []
    end = 0
    for member in tar:
        stored = member.size if member.isreg() else 0
        end = member.offset_data + -(-stored // _BLOCK) * _BLOCK
        match = _NAME.fullmatch(member.name)
        if not member.isreg() or match is None or member.issparse():
            continue
        key, extension = match[1], match[2].lower()
        if not keys or keys[-1] != key:
            keys.append(key)
            starts.append(len(extents))
        elif extension in extensions[starts[-1] :]:
            raise DataError(f"the shard {path} holds {key}.{extension} twice in a row", hint="give samples unlike keys")
        extensions.append(extension)
        extents.append((member.offset_data, member.size))
    _check_end(path, end)
    if not keys:
        raise DataError(f"the shard {path} holds no samples", hint="a sample is a row of files key.ext with one key")
    offsets, sizes = np.array(extents, dtype=np.int64).T
    names, kinds = np.unique(np.array(extensions), return_inverse=True)
    return TarIndex(
        keys=np.array([key.encode("utf-8", "surrogateescape") for key in keys]),
        starts=np.array([*starts, len(extents)], dtype=np.int64),
        extensions=names,
        kinds=kinds.astype(np.int32),
        offsets=offsets,
        sizes=sizes,
    )


def _check_end(path: Path, end: int) -> None:
    """A tar file ends with zeros. Python's reader takes any other end for the end too, and samples would be missing."""
    with path.open("rb") as file:
        file.seek(end)
        last = file.read(_BLOCK)
    if len(last) < _BLOCK or any(last):
        raise DataError(f"the shard {path} is cut off or damaged at byte {end}", hint="copy or make it again")


def _advice(path: Path) -> str:
    """What may be wrong with a file that does not open as a tar file."""
    with path.open("rb") as file:
        begin = file.read(6)
    if begin[:2] == b"\x1f\x8b" or begin[:3] == b"BZh" or begin == b"\xfd7zXZ\x00" or begin[:4] == b"\x28\xb5\x2f\xfd":
        return "it is compressed: unpack it once, so that samples can be read from anywhere"
    return "copy or make it again"


def cache_file(path: Path, directory: Path | None) -> Path:
    """Where the index of ``path`` is kept: beside it, or in ``directory``, where shards of one name may meet."""
    if directory is None:
        return path.parent / f"{path.name}.index.npz"
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]
    return directory / f"{path.name}.{digest}.index.npz"


def _load(cache: Path, made_from: NDArray[np.int64]) -> TarIndex | None:
    """What was kept; None if it is missing, damaged, or of another state of the shard.

    The digest comes before numpy and zipfile see a byte: what they make of a flipped bit is one of a dozen exceptions,
    or an index with fewer samples.
    """
    try:
        kept = cache.read_bytes()
    except OSError:
        return None
    digest, content = kept[:_DIGEST], kept[_DIGEST:]
    if hashlib.blake2b(content, digest_size=_DIGEST).digest() != digest:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        if not np.array_equal(arrays["made_from"], made_from):
            return None
        return TarIndex(*(arrays[name] for name in TarIndex.__slots__))


def _save(index: TarIndex, cache: Path, made_from: NDArray[np.int64]) -> None:
    beside = cache.with_name(f"{cache.name}.{uuid.uuid4().hex}.tmp")
    content = io.BytesIO()
    np.savez(content, made_from=made_from, **{name: getattr(index, name) for name in TarIndex.__slots__})
    digest = hashlib.blake2b(content.getbuffer(), digest_size=_DIGEST).digest()
    try:
        with beside.open("wb") as file:
            file.write(digest)
            file.write(content.getbuffer())
        beside.replace(cache)
    except OSError as error:
        with suppress(OSError):  # a read-only file system refuses this, too
            beside.unlink(missing_ok=True)
        _not_kept(cache.parent, error.strerror or type(error).__name__)


@once
def _not_kept(directory: Path, cause: str) -> None:
    """Once for a directory, which may hold a thousand shards."""
    logger().warning("tar_index.not_kept", directory=str(directory), error=cause, hint="each start reads all headers")


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


DECODERS: Mapping[str, Decoder] = {
    "txt": bytes.decode,
    "cls": int,
    "json": json.loads,
    "npy": _array,
    "png": _image,
    "jpg": _image,
    "jpeg": _image,
}
"""What is made of a file by the last part of its extension; other files stay bytes. (TarShards names them.)"""


class TarShards:
    """The samples of tar ``shards``: dicts of extension to decoded value, with the key as ``__key__``.

    ``shards`` are paths, or patterns such as ``train-{000..127}.tar`` and ``train-*.tar``. ``decode`` adds decoders by
    extension (``seg.png`` goes before ``png``), False leaves all values bytes. ``transform`` is applied to each sample.
    By themselves txt, cls, json, npy, png, jpg and jpeg are decoded; other values stay bytes.
    ``index``: True keeps what was learned of a shard beside it, a directory keeps it there, False nowhere; where it
    cannot be kept, ``tar_index.not_kept`` in the log says so.

    Attributes:
        paths: The tar files, in order.
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

    def key(self, number: int) -> str:
        """The key of sample ``number``: its files' names up to the first point."""
        shard = int(np.searchsorted(self._ends, number, side="right"))
        index = self._indexes[shard]
        return index.key(number - int(self._ends[shard]) + len(index))

    def _sample(self, path: Path, index: TarIndex, number: int) -> dict[str, Any]:
        key = index.key(number)
        sample: dict[str, Any] = {"__key__": key}
        for extension, offset, size in index.members(number):
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
