"""The manifest: the contents of a checkpoint, and the proof that it is complete.

On disk it is a JSON object ``{"xxh3_128": <checksum>, "manifest": <body>}`` in one exact spelling; the checksum covers
the body's bytes, and reading insists on the spelling, so that no changed bit of the file goes unnoticed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_serializer, model_validator

from elastic_trainer.checkpoint import layout
from elastic_trainer.checkpoint.faults import DamagedError, UnreadableError
from elastic_trainer.errors import CheckpointError

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
    return _validated(values, where)


def _validated(values: Any, where: str) -> Manifest:
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
