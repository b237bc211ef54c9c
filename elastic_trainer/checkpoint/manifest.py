"""What a checkpoint is on disk: its name, its files with their checksums, and the manifest that proves it complete.

====================================  =========================================================================
``step-000000120-r7-<nonce>``         a committed checkpoint: step 120, saved in round 7
``tmp-<nonce>-<pid>-<start>-...``     being written; the name carries the identity of the writing process
``trash-<checkpoint>-<nonce>``        being removed
``corrupt-<checkpoint>-<n>``          found damaged, kept for people to look at
``owner.json``                        locked by the process that saves here, and says who that is
====================================  =========================================================================

A name that fits none of these exactly is foreign: it is never read, moved or removed.

A file to be written is bytes that are fetched piece by piece, so the commit needs no tensor library, and any holder of
the bytes (the training process, or its node's agent) can commit them. One pass takes their checksums, and looks whether
numbers are finite while a piece is in the core's cache.

The manifest lists the files. On disk it is a JSON object ``{"xxh3_128": <checksum>, "manifest": <body>}`` in one exact
spelling; the checksum covers the body's bytes, and reading insists on the spelling, so that no changed bit of the file
goes unnoticed.

*Runs in* the threads that save, concurrently with training: no loop over tensors holds the interpreter lock.
*Fails by* NonFiniteError, which names the first watched parameter with a NaN or an infinity; DamagedError and
UnreadableError for a manifest. *Invariant*: a file gets checksums only from all of its own bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import socket
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_serializer, model_validator

from elastic_trainer.errors import CheckpointError, NonFiniteError, StorageError
from elastic_trainer.ipc.page import start_of

# ---- names


class DamagedError(CheckpointError):
    """The content is not what was committed: quarantine it and take the previous one."""


class GoneError(CheckpointError):
    """It was removed while it was read (by another process's retention): take the next one."""


class UnreadableError(CheckpointError):
    """It exists and may be good, but this process cannot read it now: keep it, report it, take the next one."""


class InUseError(StorageError):
    """Another job writes in this directory."""


MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
TENSORS_FILE = "tensors.safetensors"
"""Where one writer has written all tensors; see :func:`tensors_file` for several."""
OWNER_FILE = "owner.json"
OFFER_FILE = "offer.json"
"""In a temporary entry: what is written there, for those who help."""
RECORD_PREFIX = "record-"
"""In a temporary entry: the record of a file that is durable, by the rank that wrote it."""

STEP_DIGITS = 9
_NONCE_BYTES = 6
_NONCE = r"[0-9a-f]{12}"
_CHECKPOINT = r"step-[0-9]{9,18}-r[0-9]{1,18}-" + _NONCE

_COMMITTED_NAME = re.compile(rf"step-([0-9]{{9,18}})-r([0-9]{{1,18}})-({_NONCE})")
_TEMPORARY_NAME = re.compile(
    rf"tmp-({_NONCE})-([0-9]{{1,10}})-([0-9]{{1,20}})-([0-9a-f]{{32}})-([0-9]{{1,20}})-([A-Za-z0-9.-]{{1,64}})"
)
_TRASH_NAME = re.compile(rf"trash-({_CHECKPOINT})-{_NONCE}")
_CORRUPT_NAME = re.compile(rf"corrupt-({_CHECKPOINT})-([0-9]{{1,6}})")
_TENSORS_PART = re.compile(r"tensors-([0-9]{5})-of-([0-9]{5})\.safetensors")
MOST_PARTS = 99_999
_SAVES = itertools.count(1)
_RESCUED = "0000"
_UNSAFE_IN_HOST = re.compile(r"[^A-Za-z0-9.-]")


class Kind(StrEnum):
    """What a directory entry is, judged by its name alone."""

    COMMITTED = "committed"
    TEMPORARY = "temporary"
    TRASH = "trash"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"


def new_nonce() -> str:
    """Twelve random hexadecimal digits: two writers of the same step never meet in one name."""
    return secrets.token_hex(_NONCE_BYTES)


def ordered_nonce() -> str:
    """Twelve hexadecimal digits that grow with each call in this process, random in the last eight.

    A process may save one step twice (on schedule, and as the best): the later one counts as newer.
    """
    return f"{next(_SAVES) & 0xFFFF or 1:04x}{secrets.token_hex(4)}"


def rescued_name(round: int, step: int, turn: int) -> str:
    """The name of a state that the agent of the ``turn``-th node commits without its workers.

    The same step may have other buffers on another node, so no two nodes write under one name. Of several the first
    node's counts as newest, and a checkpoint of the state by its own process as newer still.
    """
    return str(CheckpointName(round=round, step=step, nonce=f"{_RESCUED}{0xFFFF_FFFF - turn:08x}"))


def is_rescued(name: str) -> bool:
    """Whether it is a :func:`rescued_name`."""
    parsed = parse_checkpoint(name)
    return parsed is not None and parsed.nonce.startswith(_RESCUED)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The parsed name of a committed checkpoint. Ordered by round, step and nonce: the newest is the greatest."""

    round: int
    step: int
    nonce: str = field(default_factory=ordered_nonce)

    def __post_init__(self) -> None:
        if self.step < 0 or self.round < 0:
            raise CheckpointError(
                f"a checkpoint cannot have step {self.step} and round {self.round}: both count from 0"
            )

    def __str__(self) -> str:
        return f"step-{self.step:0{STEP_DIGITS}d}-r{self.round}-{self.nonce}"


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Identity of a writing process: enough to find out, on its own machine, whether it still lives.

    ``start`` is its start time in clock ticks since boot (a reused pid has another one); ``boot`` the kernel's boot
    id; ``namespace`` the inode of its pid namespace (containers of one machine share the boot id, not the pids);
    ``host`` a :func:`host_label`.
    """

    pid: int
    start: int
    boot: str
    namespace: int
    host: str


def parse_checkpoint(text: str) -> CheckpointName | None:
    """The checkpoint that ``text`` names, or None if it is no such name."""
    match = _COMMITTED_NAME.fullmatch(text)
    if match is None:
        return None
    name = CheckpointName(round=int(match[2]), step=int(match[1]), nonce=match[3])
    return name if str(name) == text else None


def temporary_name(writer: WriterIdentity) -> str:
    """A fresh name for a directory that ``writer`` is about to fill."""
    return f"tmp-{new_nonce()}-{writer.pid}-{writer.start}-{writer.boot}-{writer.namespace}-{writer.host}"


def host_label(hostname: str) -> str:
    """``hostname`` as it may stand in a temporary name."""
    return _UNSAFE_IN_HOST.sub(".", hostname)[:64] or "unnamed"


def parse_temporary(text: str) -> WriterIdentity | None:
    """The writer that the temporary name ``text`` carries, or None if it is no such name."""
    match = _TEMPORARY_NAME.fullmatch(text)
    if match is None:
        return None
    return WriterIdentity(pid=int(match[2]), start=int(match[3]), boot=match[4], namespace=int(match[5]), host=match[6])


def tensors_file(part: int, parts: int) -> str:
    """The file of the tensors of the writer ``part``, from 0, of ``parts``."""
    if not 0 <= part < parts <= MOST_PARTS:
        raise ValueError(f"there is no part {part} of {parts}")
    return TENSORS_FILE if parts == 1 else f"tensors-{part + 1:05d}-of-{parts:05d}.safetensors"


def part_of(names: Collection[str]) -> tuple[int, int] | None:
    """Of the files of one shard rank: its index, and how many there are; None for the files of a whole checkpoint."""
    found = [part for part in map(tensor_part, names) if part is not None]
    return found[0] if len(found) == 1 else None


def tensor_part(name: str) -> tuple[int, int] | None:
    """Which of several files of tensors ``name`` is, from 0, and of how many; None if it is none."""
    match = _TENSORS_PART.fullmatch(name)
    return (int(match[1]) - 1, int(match[2])) if match else None


def tensor_files(names: Collection[str]) -> tuple[str, ...]:
    """The files of tensors among ``names``, in order; none where they are not exactly those of one checkpoint."""
    counts = {part[1] for part in map(tensor_part, names) if part is not None}
    parts = counts.pop() if len(counts) == 1 and TENSORS_FILE not in names else 1
    expected = tuple(tensors_file(part, parts) for part in range(parts))
    return () if counts or not set(expected) <= set(names) else expected


def trash_name(checkpoint: str) -> str:
    """A fresh name to move the checkpoint ``checkpoint`` to before it is removed."""
    return f"trash-{checkpoint}-{new_nonce()}"


def quarantine_name(checkpoint: str, number: int) -> str:
    """The ``number``-th name for the damaged checkpoint ``checkpoint``."""
    return f"corrupt-{checkpoint}-{number}"


def quarantined(text: str) -> str | None:
    """The checkpoint name inside the quarantine name ``text``, or None if it is no such name."""
    match = _CORRUPT_NAME.fullmatch(text)
    return match[1] if match else None


def trashed(text: str) -> str | None:
    """The checkpoint name inside the trash name ``text``, or None if it is no such name."""
    match = _TRASH_NAME.fullmatch(text)
    return match[1] if match else None


def kind_of(text: str) -> Kind:
    """What the directory entry ``text`` is."""
    if parse_checkpoint(text) is not None:
        return Kind.COMMITTED
    if parse_temporary(text) is not None:
        return Kind.TEMPORARY
    if _TRASH_NAME.fullmatch(text):
        return Kind.TRASH
    return Kind.QUARANTINED if quarantined(text) is not None else Kind.FOREIGN


_NO_BOOT_ID = "0" * 32


def this_process() -> WriterIdentity:
    """The identity of this process. Read anew each time, because it changes over a fork."""
    return WriterIdentity(
        pid=os.getpid(),
        start=start_of(os.getpid()) or 0,
        boot=_boot_id(),
        namespace=_pid_namespace(),
        host=host_label(socket.gethostname()),
    )


def alive(writer: WriterIdentity, me: WriterIdentity) -> bool | None:
    """Whether ``writer`` lives; None if this machine's kernel cannot know."""
    same_kernel = (writer.boot, writer.namespace) == (me.boot, me.namespace)
    if not same_kernel or writer.boot == _NO_BOOT_ID or writer.start == 0 or writer.namespace == 0:
        return None
    return start_of(writer.pid) == writer.start


def _boot_id() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "").lower()
    except OSError:
        return _NO_BOOT_ID
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else _NO_BOOT_ID


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


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


def record(file: FileImage) -> FileRecord:
    """The record of a file whose checksums are known."""
    return FileRecord(name=file.name, size=file.size, head_size=len(file.head), chunk_size=CHUNK, chunks=file.checksums)


class Checksums:
    """Computes the checksums of ``file`` from pieces of its body, none of which spans a multiple of CHUNK."""

    def __init__(self, file: FileImage) -> None:
        self._file, self._seen, self._digest = file, 0, xxhash.xxh3_128()
        self._found = [xxhash.xxh3_128_hexdigest(file.head)] if file.head else []

    def add(self, piece: memoryview) -> None:
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
        several = any(tensor_part(each.name) for each in files)
        return self.model_copy(update={"files": files, "format": FORMAT if several else ONE_FILE})

    def tensor_files(self) -> tuple[FileRecord, ...]:
        """The records of the files with tensors, in order; DamagedError if they are not listed as they should be."""
        names = tensor_files([each.name for each in self.files]) or (TENSORS_FILE,)
        return tuple(map(self.file, names))

    def file(self, name: str) -> FileRecord:
        """The record of the file ``name``; DamagedError if this checkpoint should have it and has not."""
        for record in self.files:
            if record.name == name:
                return record
        raise DamagedError(f"checkpoint {self.name}: its manifest does not list {name}")


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
    return _OPENING + xxhash.xxh3_128_hexdigest(body).encode() + _MIDDLE + body + _CLOSING


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
