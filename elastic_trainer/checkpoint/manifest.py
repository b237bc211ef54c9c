"""The files of a checkpoint: their bytes before they are written, the checksums of these, and the manifest.

A file to be written is bytes that are fetched piece by piece, so the commit needs no tensor library, and any holder of
the bytes (the training process, or its node's agent) can commit them. One pass takes their checksums, and looks whether
numbers are finite while a piece is in the core's cache.

The manifest lists the files, and proves that the checkpoint is complete. On disk it is a JSON object ``{"xxh3_128":
<checksum>, "manifest": <body>}`` in one exact spelling; the checksum covers the body's bytes, and reading insists on
the spelling, so that no changed bit of the file goes unnoticed.

*Runs in* the threads that save, concurrently with training: no loop over tensors holds the interpreter lock.
*Fails by* NonFiniteError, which names the first watched parameter with a NaN or an infinity; DamagedError and
UnreadableError for a manifest. *Invariant*: a file gets checksums only from all of its own bytes.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_serializer, model_validator

from elastic_trainer.checkpoint import layout
from elastic_trainer.checkpoint.layout import DamagedError, UnreadableError
from elastic_trainer.errors import CheckpointError, NonFiniteError

# ---- bytes to be written


PIECE = 1 << 20
"""Bytes read and hashed at a time: small enough to stay in a core's cache in between."""
_SMALL = 64 << 10
_FILES_OF_ONE = 2
"""The tensors and the skeleton."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Bytes in the memory of an accelerator, as the one-dimensional byte tensor ``data``."""

    data: Any

    def __len__(self) -> int:
        return int(self.data.nbytes)

    def __getitem__(self, part: slice) -> OnDevice:
        return OnDevice(self.data[part])

    def fetch(self) -> memoryview:
        """A copy in host memory."""
        return memoryview(self.data.cpu().numpy())


@dataclass(frozen=True, slots=True)
class FileImage:
    """One file: ``head`` first, then ``body_size`` bytes that ``body()`` yields in order (each time it is called)."""

    name: str
    head: bytes
    body_size: int
    body: Callable[[], Iterable[memoryview]]
    checksums: tuple[str, ...] = ()
    """Those of its record, if this process has taken them from memory that only it writes to. A commit that finds them
    takes no others, so bytes that came from elsewhere must have none."""
    parts: Callable[[], Iterable[memoryview | OnDevice]] | None = None
    """``body`` with accelerator data still on the accelerator."""

    @property
    def size(self) -> int:
        return len(self.head) + self.body_size


@dataclass(frozen=True, slots=True)
class WatchedTensor:
    """Numbers that must be finite: element type and position in the body of the file ``file``; ``label`` for people."""

    label: str
    file: str
    dtype: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Image:
    """All files but the manifest."""

    files: tuple[FileImage, ...]
    watched: tuple[WatchedTensor, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def shared(self) -> bool:
        """Whether its tensors are split into several files, for several writers."""
        return len(self.files) > _FILES_OF_ONE


def from_bytes(name: str, content: bytes) -> FileImage:
    """A file of the given content."""
    return FileImage(name, b"", len(content), lambda: (memoryview(content),))


def pieces(views: Iterable[memoryview], chunk_size: int) -> Iterator[memoryview]:
    """The bytes of ``views`` in pieces, none of which spans a multiple of ``chunk_size``.

    Runs of small views are joined first: thousands of scalars become a few writes.
    """
    position = 0
    for view in _joined(views):
        start = 0
        while start < len(view):
            length = min(len(view) - start, chunk_size - position % chunk_size)
            yield view[start : start + length]
            start += length
            position += length


def _joined(views: Iterable[memoryview]) -> Iterator[memoryview]:
    waiting: list[memoryview] = []
    waiting_size = 0
    for view in views:
        if len(view) < _SMALL and waiting_size < PIECE:
            waiting.append(view)
            waiting_size += len(view)
            continue
        if waiting:
            yield memoryview(b"".join(waiting))
            waiting, waiting_size = [], 0
        yield view
    if waiting:
        yield memoryview(b"".join(waiting))


# ---- their checksums


CHUNK = 8 << 20
"""Bytes covered by one checksum."""
_FLOATS = {"F64": "f8", "F32": "f4"}
_LARGEST = {"F16": ("u2", 0x7BFF), "BF16": ("u2", 0x7F7F), "F8_E4M3": ("u1", 0x7E), "F8_E5M2": ("u1", 0x7B)}
"""The bits of the largest finite number, for types that numpy lacks or handles slowly."""


def checked(image: Image) -> Image:
    """``image`` with the checksums of its files. NonFiniteError if a watched tensor is not finite."""
    return replace(image, files=tuple(_checked(file, image.watched) for file in image.files))


def records(image: Image) -> tuple[FileRecord, ...]:
    """The records of the files of ``image``, as a commit would make them."""
    return tuple(record(file) for file in checked(image).files)


def record(file: FileImage) -> FileRecord:
    """The record of a file whose checksums are known."""
    return FileRecord(name=file.name, size=file.size, head_size=len(file.head), chunk_size=CHUNK, chunks=file.checksums)


class Checksums:
    """Computes the checksums of ``file`` from pieces of its body, none of which spans a multiple of CHUNK."""

    def __init__(self, file: FileImage) -> None:
        self._file, self._seen, self._digest = file, 0, xxhash.xxh3_128()
        self._found = [checksum(file.head)] if file.head else []

    def add(self, piece: memoryview) -> None:
        """Add the next piece."""
        self._digest.update(piece)
        self._seen += len(piece)
        if self._seen % CHUNK == 0 or self._seen == self._file.body_size:
            self._found.append(self._digest.hexdigest())
            self._digest.reset()

    def taken(self) -> FileImage:
        """The file with its checksums, after all pieces were added."""
        if self._seen != self._file.body_size:
            raise RuntimeError(f"{self._file.name}: received {self._seen} of {self._file.body_size} bytes")
        return replace(self._file, checksums=tuple(self._found))


def _checked(file: FileImage, watched: Iterable[WatchedTensor]) -> FileImage:
    numbers = sorted((each for each in watched if each.file == file.name), key=lambda each: each.begin)
    runs, at, position, sums = _runs(numbers), 0, 0, Checksums(file)
    for piece in pieces(file.body(), PIECE):
        sums.add(piece)
        end = position + len(piece)
        while at < len(runs) and runs[at].begin < end:
            first = max(runs[at].begin, position)
            bad = _nonfinite(piece[first - position : runs[at].end - position], runs[at].dtype)
            if bad is not None:
                raise not_finite(numbers[bisect_right(numbers, first + bad, key=lambda each: each.begin) - 1].label)
            if runs[at].end > end:
                break
            at += 1
        position = end
    return sums.taken()


def _runs(numbers: Sequence[WatchedTensor]) -> list[WatchedTensor]:
    """Merges neighbours of one type, so that thousands of small tensors need few checks."""
    runs: list[WatchedTensor] = []
    for each in numbers:
        if runs and (runs[-1].end, runs[-1].dtype) == (each.begin, each.dtype):
            runs[-1] = replace(runs[-1], end=each.end)
        else:
            runs.append(each)
    return runs


def _nonfinite(data: memoryview, dtype: str) -> int | None:
    """Offset of the first NaN or infinity in ``data``; examines all elements only if their sum is not finite."""
    import numpy as np

    if dtype in _FLOATS:
        values = np.frombuffer(data, _FLOATS[dtype])
        with np.errstate(all="ignore"):
            if np.isfinite(values.sum()):
                return None
        bad = ~np.isfinite(values)
    elif dtype in _LARGEST:
        kind, largest = _LARGEST[dtype]
        values = np.frombuffer(data, kind)
        bad = (values & np.array(np.iinfo(kind).max >> 1, kind)) > largest
    else:
        return None
    first = int(bad.argmax())
    return first * values.itemsize if bad[first] else None


def not_finite(name: str) -> NonFiniteError:
    """The error of a state whose parameter ``name`` is not finite."""
    return NonFiniteError(
        f"parameter {name!r} is no longer finite; this state is not saved",
        hint="lower the learning rate, clip gradients, or look for bad samples",
    )


# ---- the manifest


FORMAT = 2
"""The newest version of the layout of a checkpoint. A reader refuses (and never quarantines) what is newer."""
ONE_FILE = 1
"""The version of a checkpoint whose tensors are whole and in one file: earlier versions read it too."""

DIGEST_HEX = 32
_OPENING = b'{"xxh3_128": "'
_MIDDLE = b'",\n"manifest": '
_CLOSING = b"}\n"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class FileRecord(_Frozen):
    """One file: its size and the XXH3-128 checksums of its chunks.

    The first ``head_size`` bytes are a chunk of their own (a header that must be trusted before the rest can be
    placed); after it come chunks of ``chunk_size`` bytes, the last one shorter.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    size: int = Field(ge=0)
    head_size: int = Field(ge=0)
    chunk_size: int = Field(gt=0)
    chunks: tuple[str, ...]

    @model_validator(mode="after")
    def _consistent(self) -> FileRecord:
        body_chunks = -(-(self.size - self.head_size) // self.chunk_size)
        if self.head_size > self.size or len(self.chunks) != bool(self.head_size) + body_chunks:
            raise ValueError("its sizes and chunks do not match")
        return self

    def bound(self, index: int) -> tuple[int, int]:
        if self.head_size and index == 0:
            return 0, self.head_size
        begin = self.head_size + (index - bool(self.head_size)) * self.chunk_size
        return begin, min(begin + self.chunk_size, self.size)

    def chunks_of(self, begin: int, end: int) -> range:
        """The chunks behind the head that hold the bytes from ``begin`` to ``end``."""
        first, last = begin - self.head_size, end - self.head_size - 1
        return range(
            bool(self.head_size) + first // self.chunk_size, bool(self.head_size) + last // self.chunk_size + 1
        )


class Manifest(_Frozen):
    """The contents of a checkpoint and its state. ``created`` (Unix seconds) is for people, never for ordering.

    ``run`` names the run that saved it; None for one without a name, and in checkpoints of earlier versions.
    """

    format: int = ONE_FILE
    name: str
    run: str | None = None
    step: int = Field(ge=0)
    round: int = Field(ge=0)
    epoch: int = Field(ge=0)
    samples: int = Field(ge=0)
    world_size: int = Field(ge=1)
    created: float
    metrics: dict[str, float] = {}
    best: bool = False
    fields: dict[str, JsonValue] = {}
    versions: dict[str, str] = {}
    files: tuple[FileRecord, ...]

    @field_serializer("metrics", when_used="json")
    def _metrics_as_json(self, metrics: dict[str, float]) -> dict[str, float | str]:
        """JSON cannot represent nan and inf; strings validate back to floats."""
        return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files)

    def with_files(self, files: tuple[FileRecord, ...]) -> Manifest:
        """The same for ``files``, of the lowest format that has them."""
        several = any(layout.tensor_part(each.name) for each in files)
        return self.model_copy(update={"files": files, "format": FORMAT if several else ONE_FILE})

    def tensor_files(self) -> tuple[FileRecord, ...]:
        """The records of the files with tensors, in order; DamagedError if they are not listed as they should be."""
        names = layout.tensor_files([each.name for each in self.files]) or (layout.TENSORS_FILE,)
        return tuple(map(self.file, names))

    def file(self, name: str) -> FileRecord:
        """The record of the file ``name``; DamagedError if this checkpoint should have it and has not."""
        for record in self.files:
            if record.name == name:
                return record
        raise DamagedError(f"checkpoint {self.name}: its manifest does not list {name}")


def checksum(data: bytes | memoryview) -> str:
    """XXH3-128 of ``data`` in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` as plain JSON; CheckpointError naming the first one that is not JSON."""
    plain = {}
    for key, value in fields.items():
        try:
            plain[str(key)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint field {key!r} is not JSON: {error}",
                hint="use str, int, finite float, bool, None, list, dict",
            ) from error
    return plain


def seal(manifest: Manifest) -> bytes:
    """The bytes of the manifest file."""
    body = json.dumps(manifest.model_dump(mode="json"), indent=1, allow_nan=False).encode()
    return _sealed(body)


def _sealed(body: bytes) -> bytes:
    return _OPENING + checksum(body).encode() + _MIDDLE + body + _CLOSING


def unseal(data: bytes, where: str) -> Manifest:
    """The manifest in the file content ``data`` of the checkpoint named ``where``.

    Raises DamagedError if anything about it is not as it was written, UnreadableError if a newer version wrote it.
    """
    start = len(_OPENING) + DIGEST_HEX + len(_MIDDLE)
    body = data[start : len(data) - len(_CLOSING)]
    if _sealed(body) != data:
        raise DamagedError(f"checkpoint {where}: the manifest does not match its own checksum")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"checkpoint {where}: the manifest is not JSON") from error
    version = values.get("format") if isinstance(values, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise UnreadableError(
            f"checkpoint {where} has format {version}; this version reads up to {FORMAT}",
            hint="upgrade elastic-trainer to read it",
        )
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"checkpoint {where}: manifest field '{field}': {first['msg']}") from error
    if manifest.name != where:
        raise DamagedError(f"checkpoint {where}: its manifest is that of {manifest.name}")
    return manifest
