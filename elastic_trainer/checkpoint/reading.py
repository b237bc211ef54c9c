"""Reads a checkpoint without trust: every byte is checked against the manifest on its way into memory.

*Runs in* any reading process; short-lived threads read large files. *Owns* the files it opens.
*Fails by* DamagedError, GoneError or UnreadableError; nothing is changed on disk.
*Invariant*: each byte is read once, and used only after the checksum of its chunk was compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from elastic_trainer.checkpoint import codec, tensorfile, tensors
from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.goals import Detour, FileRange, Goal, plan
from elastic_trainer.checkpoint.image import PIECE
from elastic_trainer.checkpoint.layout import MANIFEST_FILE, STATE_FILE, TENSORS_FILE
from elastic_trainer.checkpoint.live import NOTHING_LIVE, Live
from elastic_trainer.checkpoint.manifest import FileRecord, Manifest, unseal
from elastic_trainer.checkpoint.slices import TensorSlice, assemble, in_file
from elastic_trainer.checkpoint.storage import ByteSource
from elastic_trainer.checkpoint.tensorfile import Placed
from elastic_trainer.checkpoint.tensors import Slab

_LONGEST_MANIFEST = 256 << 20

Buffers = Callable[[int, int], Iterator[memoryview]]
"""Where the bytes from a begin to an end of a file go, in order."""


class CheckpointFiles(Protocol):
    """A source of checkpoint files: a storage, or a snapshot in memory."""

    def exists(self, name: str) -> bool: ...

    def source(self, name: str, file: str) -> ByteSource: ...


def checked(files: CheckpointFiles, check: Callable[[], None] | None) -> CheckpointFiles:
    """``files``, of which nothing is read before ``check()`` has returned: it raises to end the reading."""
    return files if check is None else _Checked(files, check)


@dataclass(frozen=True, slots=True)
class _Checked:
    files: CheckpointFiles
    check: Callable[[], None]

    def exists(self, name: str) -> bool:
        return self.files.exists(name)

    def source(self, name: str, file: str) -> ByteSource:
        return _CheckedSource(self.files.source(name, file), self.check)


class _CheckedSource:
    def __init__(self, source: ByteSource, check: Callable[[], None]) -> None:
        self._source, self._check = source, check
        self.size, self.readers, self.close = source.size, source.readers, source.close

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        self._check()
        return self._source.read_into(buffer, offset)


def read_manifest(storage: CheckpointFiles, name: str) -> Manifest:
    """The verified manifest of the checkpoint ``name``."""
    with _found(storage, name, MANIFEST_FILE) as source:
        if source.size > _LONGEST_MANIFEST:
            raise DamagedError(f"checkpoint {name}: its manifest has {source.size} bytes, more than any can have")
        content = bytearray(source.size)
        if not source.read_into(memoryview(content), 0):
            raise DamagedError(f"checkpoint {name}: {MANIFEST_FILE} is cut off")
    return unseal(bytes(content), name)


def read_state(storage: CheckpointFiles, manifest: Manifest, live: Live = NOTHING_LIVE) -> dict[str, Any]:
    """The state in the checkpoint of ``manifest``; tensors are on the CPU, or the ``live`` ones.

    Live tensors may be overwritten with data that turn out to be damaged: then read another checkpoint, or exit.
    """
    if live is NOTHING_LIVE:
        skeleton = read_skeleton(storage, manifest)
        loaded = tensors.build(*read_tensors(storage, manifest))
        return codec.decode(skeleton, loaded, f"checkpoint {manifest.name}")
    filling = Filling(read_outline(storage, manifest), live)
    fill(storage, manifest.name, filling)
    return filling.state()


@dataclass(frozen=True, slots=True)
class Outline:
    """A checkpoint without the data of its tensors, verified; ``heads`` are those of the files of tensors."""

    manifest: Manifest
    skeleton: bytes
    heads: tuple[bytes, ...]

    def files(self) -> tuple[TensorFile, ...]:
        records = self.manifest.tensor_files()
        return tuple(_parsed(self.manifest.name, *each) for each in zip(records, self.heads, strict=True))


def read_outline(storage: CheckpointFiles, manifest: Manifest) -> Outline:
    """That of the checkpoint of ``manifest``."""
    heads = tuple(bytes(_read_head(storage, manifest.name, each)) for each in manifest.tensor_files())
    return Outline(manifest, bytes(read_skeleton(storage, manifest)), heads)


def fill(storage: CheckpointFiles, name: str, filling: Filling) -> None:
    """Read all that ``filling`` lacks of the checkpoint ``name``."""
    for file in filling.files:
        _fill(storage, name, file, filling.reads(file))


class Filling:
    """A state whose data have not arrived yet: they go to ``live`` tensors or to new ones."""

    def __init__(self, outline: Outline, live: Live) -> None:
        self._skeleton, self._where = outline.skeleton, f"checkpoint {outline.manifest.name}"
        self.files = outline.files()
        found = whole_tensors(self.files, outline.manifest)
        self._held: Mapping[str, Any] = {} if live is NOTHING_LIVE else self._chosen(found, live)
        fresh = [each for each in found if each.name not in self._held]
        self._fresh = tensorfile.place(fresh) if self._held else found
        self._slabs = tensors.allocate(self._fresh)
        self._goals: Mapping[str, Goal] = {}
        if self._held or not self.files[0].alone:
            held = {name: tensors.goal_of(each) for name, each in self._held.items() if not each.is_meta}
            self._goals = held | tensors.goals_in(self._slabs)

    def _chosen(self, found: Sequence[Placed], live: Live) -> Mapping[str, Any]:
        """Those of the ``live`` tensors into which ``found`` ones are read."""
        leaves = codec.outline(self._skeleton, self._where)
        blobs = {str(leaf.tensor) for leaf in leaves.values() if leaf.mark == "blob"}
        fits = live.fits(codec.decode(self._skeleton, tensors.without_data(found, blobs), self._where))
        return live.chosen(leaves, found) if fits else {}

    def reads(self, file: TensorFile) -> Iterator[tuple[Sequence[FileRange], Sequence[Detour]]]:
        """What ``file`` has for this state, in its order, in batches of a bounded amount of memory on the way."""
        if self._goals:
            yield from plan(file.record.head_size, file.placed, file.slices(), self._goals)
            return
        begin = file.record.head_size  # it is read as it is: thousands of tensors need no look at each
        yield (
            [FileRange(begin + slab.begin, begin + slab.begin + len(slab.view), slab.view) for slab in self._slabs],
            [],
        )

    def wanted(self) -> frozenset[tuple[str, int]]:
        """The chunks with data of this state, each by the name of its file and its number there."""
        return frozenset(
            (file.record.name, index)
            for file in self.files
            for segments, _ in self.reads(file)
            for each in segments
            for index in file.record.chunks_of(each.begin, each.end)
        )

    def state(self) -> dict[str, Any]:
        """The state, after all data have arrived."""
        loaded = {**tensors.build(self._fresh, self._slabs), **self._held}
        return codec.decode(self._skeleton, loaded, self._where)


def read_skeleton(storage: CheckpointFiles, manifest: Manifest) -> bytearray:
    """The verified structure of the state, without its tensors."""
    return _read_whole(storage, manifest.name, manifest.file(STATE_FILE))


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The verified header of one file of tensors: the positions of its tensors, and their slices."""

    record: FileRecord
    placed: tuple[Placed, ...]
    notes: Mapping[str, Any]
    where: str

    @property
    def alone(self) -> bool:
        """Whether it is the one file, which holds whole tensors only."""
        return self.record.name == TENSORS_FILE

    def slices(self) -> tuple[TensorSlice, ...]:
        return in_file(self.placed, {} if self.alone else self.notes, self.where)


def read_headers(storage: CheckpointFiles, manifest: Manifest) -> tuple[TensorFile, ...]:
    """The headers of all files of tensors; the data are not read."""
    name, records = manifest.name, manifest.tensor_files()
    return tuple(_parsed(name, record, _read_head(storage, name, record)) for record in records)


def whole_tensors(files: Sequence[TensorFile], manifest: Manifest) -> tuple[Placed, ...]:
    """The tensors that ``files`` make together; DamagedError where one is not complete."""
    if len(files) == 1 and files[0].alone:
        return files[0].placed
    return assemble((each for file in files for each in file.slices()), f"checkpoint {manifest.name}")


def read_tensors(
    storage: CheckpointFiles, manifest: Manifest, wanted: Callable[[str], bool] | None = None
) -> tuple[tuple[Placed, ...], tuple[Slab, ...]]:
    """The tensors, or those that are ``wanted`` by name, and the memory that holds them. Needs no torch.

    Data go straight to their place in it, but for slices that have gaps there: they take a way round.
    """
    files = read_headers(storage, manifest)
    found = whole_tensors(files, manifest)
    if wanted is not None:
        found = tensorfile.place([each for each in found if wanted(each.name)])
    slabs = tensors.allocate(found)
    goals: Mapping[str, Goal] | None = None
    for file in files:
        if wanted is None and file.alone:
            _read_data(storage, manifest.name, file, _as_it_is(file, slabs))
            continue
        goals = tensors.goals_in(slabs) if goals is None else goals
        _fill(storage, manifest.name, file, plan(file.record.head_size, file.placed, file.slices(), goals))
    return found, slabs


def _as_it_is(file: TensorFile, slabs: Sequence[Slab]) -> list[FileRange]:
    """The reads of all of ``file`` to ``slabs``: thousands of tensors need no look at each."""
    begin = file.record.head_size
    return [FileRange(begin + slab.begin, begin + slab.begin + len(slab.view), slab.view) for slab in slabs]


def _fill(
    storage: CheckpointFiles,
    name: str,
    file: TensorFile,
    reads: Iterable[tuple[Sequence[FileRange], Sequence[Detour]]],
) -> None:
    for segments, detours in reads:
        _read_data(storage, name, file, segments)
        for each in detours:
            each.land()


def read_in_turn(
    storage: CheckpointFiles, manifest: Manifest, wanted: Sequence[Placed], most: int = 256 << 20
) -> Iterator[tuple[Placed, Any]]:
    """The ``wanted`` tensors one by one, each with its bytes as a numpy array; few more than ``most`` are in memory."""
    start = 0
    while start < len(wanted):
        end, size = start + 1, wanted[start].size
        while end < len(wanted) and size + wanted[end].size <= most:
            size += wanted[end].size
            end += 1
        names = {each.name for each in wanted[start:end]}
        found = tensors.arrays(*read_tensors(storage, manifest, names.__contains__))
        for each in wanted[start:end]:
            yield each, found[each.name]
        start = end


def verify(storage: CheckpointFiles, manifest: Manifest) -> None:
    """Read every byte of the checkpoint of ``manifest`` and compare it; keeps nothing, needs no torch."""
    buffers = _reused_piece()
    for record in manifest.files:
        with opened(storage, manifest.name, record) as source:
            for index in range(len(record.chunks)):
                read_chunk(source, manifest.name, record, index, buffers)


def _reused_piece() -> Buffers:
    piece = memoryview(bytearray(PIECE))
    return lambda begin, end: (piece[: min(PIECE, end - start)] for start in range(begin, end, PIECE))


def _read_whole(storage: CheckpointFiles, name: str, record: FileRecord) -> bytearray:
    with opened(storage, name, record) as source:
        content = bytearray(record.size)
        _read_chunks(source, name, record, range(len(record.chunks)), lambda b, e: cut(memoryview(content)[b:e]))
    return content


def _read_head(storage: CheckpointFiles, name: str, record: FileRecord) -> bytearray:
    """A header is a chunk of its own."""
    if record.head_size == 0:
        raise DamagedError(f"checkpoint {name}: {record.name} has no header")
    with opened(storage, name, record) as source:
        head = bytearray(record.head_size)
        read_chunk(source, name, record, 0, lambda b, e: cut(memoryview(head)[b:e]))
    return head


def _parsed(name: str, record: FileRecord, head: bytes | bytearray) -> TensorFile:
    where = f"checkpoint {name}: {record.name}"
    placed = tensorfile.parse(head, record.size - record.head_size, where)
    return TensorFile(record, placed, {} if record.name == TENSORS_FILE else tensorfile.metadata(head, where), where)


def _read_data(storage: CheckpointFiles, name: str, file: TensorFile, segments: Sequence[FileRange]) -> None:
    """Read ``segments`` in file order; skips chunks without any of them."""
    record, starts = file.record, [each.begin for each in segments]
    chunks = {index for each in segments for index in record.chunks_of(each.begin, each.end)}
    if not chunks:
        return

    def buffers(begin: int, end: int) -> Iterator[memoryview]:
        unwanted, index = memoryview(b""), max(0, bisect_right(starts, begin) - 1)
        while begin < end:
            each = segments[index] if index < len(segments) else None
            if each is not None and each.begin <= begin < each.end:
                last = min(end, each.end)
                yield from cut(each.view[begin - each.begin : last - each.begin])
            elif each is not None and each.end <= begin:
                index, last = index + 1, begin
            else:
                last = min(end, begin + PIECE, end if each is None else each.begin)
                unwanted = unwanted if len(unwanted) >= last - begin else memoryview(bytearray(last - begin))
                yield unwanted[: last - begin]
            begin = last

    with opened(storage, name, record) as source:
        _read_chunks(source, name, record, sorted(chunks), buffers)


def cut(view: memoryview) -> Iterator[memoryview]:
    """``view`` in pieces that stay in a core's cache."""
    return (view[start : start + PIECE] for start in range(0, len(view), PIECE))


def _read_chunks(source: ByteSource, name: str, record: FileRecord, chunks: Sequence[int], buffers: Buffers) -> None:
    """Read and compare ``chunks``, several at a time; stops at the first problem."""
    threads = min(source.readers, len(chunks))
    if threads < 2:
        for index in chunks:
            read_chunk(source, name, record, index, buffers)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")
    try:
        for done in [pool.submit(read_chunk, source, name, record, index, buffers) for index in chunks]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_chunk(source: ByteSource, name: str, record: FileRecord, index: int, buffers: Buffers) -> None:
    """Read and compare one chunk of the file ``record`` of the checkpoint ``name``."""
    begin, end = record.bound(index)
    digest = xxhash.xxh3_128()
    position = begin
    for buffer in buffers(begin, end):
        try:
            complete = source.read_into(buffer, position)
        except OSError as error:
            raise _cannot_read(name, record.name, error) from error
        if not complete:
            raise DamagedError(f"checkpoint {name}: {record.name} is cut off within bytes {begin} to {end}")
        digest.update(buffer)
        position += len(buffer)
    if digest.hexdigest() != record.chunks[index]:
        raise DamagedError(f"checkpoint {name}: bytes {begin} to {end} of {record.name} do not match their checksum")


@contextmanager
def opened(storage: CheckpointFiles, name: str, record: FileRecord) -> Iterator[ByteSource]:
    """The open file of ``record``, whose size is right."""
    with _found(storage, name, record.name) as source:
        if source.size != record.size:
            raise DamagedError(f"checkpoint {name}: {record.name} has {source.size} bytes; {record.size} were written")
        yield source


@contextmanager
def _found(storage: CheckpointFiles, name: str, file: str) -> Iterator[ByteSource]:
    """The open file; distinguishes a missing file from a checkpoint that was removed."""
    try:
        source = storage.source(name, file)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not storage.exists(name):
            raise GoneError(f"checkpoint {name} was removed meanwhile") from error
        raise DamagedError(f"checkpoint {name}: {file} is missing") from error
    except OSError as error:
        raise _cannot_read(name, file, error) from error
    try:
        yield source
    except OSError as error:
        raise _cannot_read(name, file, error) from error
    finally:
        source.close()


def _cannot_read(name: str, file: str, error: OSError) -> UnreadableError:
    hint = getattr(error, "hint", "check its owner, mode and disk")
    return UnreadableError(f"checkpoint {name}: {file} cannot be read: {error.strerror or error}", hint=hint)
