"""Reads a checkpoint without trust: every byte is checked against the manifest on its way into memory.

A tensor is read straight into the live one at the same path of the state, if type and shape are equal, else into new
memory; of a sharded tensor only the local shard. Bytes that are contiguous both in the file and in memory are read
directly; the rows of all others go through a bounded buffer. Several processes can read one checkpoint in parts, each
a chunk with its own checksum, and send them to each other.

*Runs in* any reading process; short-lived threads read large files. *Owns* the files it opens.
*Fails by* DamagedError, GoneError or UnreadableError; nothing is changed on disk.
*Invariant*: each byte is read once, and used only after the checksum of its chunk was compared.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import xxhash

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint.codec import ELEMENT_SIZE, Leaf, Slab, TensorEntry, TensorSlice, assemble, slices_of
from elastic_trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    PIECE,
    STATE_FILE,
    TENSORS_FILE,
    DamagedError,
    FileRecord,
    GoneError,
    Manifest,
    UnreadableError,
    unseal,
)
from elastic_trainer.checkpoint.storage import ByteSource

if TYPE_CHECKING:
    import torch


# ---- into what


StatePath = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LoadInto:
    """The live tensors: ``state`` is a state dict; ``like`` has, by path, models of tensors that it lacks.

    The state of an optimizer that has made no step is empty; ``like`` then has its parameters, by the paths of their
    states. ``fits`` gets the stored state, with tensors on the meta device, before anything is changed; it may raise.
    If it returns False, the whole state is created as new tensors.
    """

    state: Mapping[str, Any] = field(default_factory=dict)
    like: Mapping[StatePath, torch.Tensor] = field(default_factory=dict)
    fits: Callable[[dict[str, Any]], bool] = lambda state: True

    def chosen(self, leaves: Mapping[StatePath, Leaf], found: Sequence[TensorEntry]) -> dict[str, torch.Tensor]:
        """The tensors to fill, by the names of the stored ones."""
        stored = {each.name: each for each in found}
        result: dict[str, torch.Tensor] = {}
        for path, leaf in leaves.items():
            if leaf.mark != "tensor" or leaf.tensor is None or leaf.tensor in result:
                continue
            tensor = self._at(path, stored[leaf.tensor])
            if tensor is not None:
                result[leaf.tensor] = tensor
        return result

    def _at(self, path: StatePath, stored: TensorEntry) -> Any:
        import torch

        there = _value_at(self.state, path)
        if codec.fits(there, stored) or (codec.is_elsewhere(there) and tuple(there.shape) == stored.shape):
            return there
        model = self.like.get(path[:-1])
        if model is None or tuple(model.shape) != stored.shape:
            return None
        if not codec.is_sharded(model) and not codec.is_elsewhere(model):
            return None
        return torch.empty_like(model.detach(), dtype=codec.dtypes()[stored.dtype])


LOAD_NEW = LoadInto()


def _value_at(state: Any, path: StatePath) -> Any:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state


# ---- a checkpoint


_LONGEST_MANIFEST = 256 << 20
_IN_TURN = 256 << 20
"""Bytes of tensors in memory at a time, unless one has more."""

Buffers = Callable[[int, int], Iterator[memoryview]]
"""Where the bytes from a begin to an end of a file go, in order."""


class CheckpointFiles(Protocol):
    """A source of checkpoint files: a storage, or a snapshot in memory."""

    def exists(self, name: str) -> bool: ...

    def source(self, name: str, file: str) -> ByteSource: ...


@dataclass(frozen=True, slots=True)
class WatchedFiles:
    """``files``; before bytes of them are read, ``hear`` gets their number, and may raise to end the reading."""

    files: CheckpointFiles
    hear: Callable[[int], object]

    def exists(self, name: str) -> bool:
        return self.files.exists(name)

    def source(self, name: str, file: str) -> ByteSource:
        return _WatchedSource(self.files.source(name, file), self.hear)


class _WatchedSource:
    def __init__(self, source: ByteSource, hear: Callable[[int], object]) -> None:
        self._source, self._hear = source, hear
        self.size, self.readers, self.close = source.size, source.readers, source.close

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        self._hear(len(buffer))
        return self._source.read_into(buffer, offset)


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint to be read."""

    files: CheckpointFiles
    manifest: Manifest

    @property
    def where(self) -> str:
        return f"checkpoint {self.manifest.name}"


def read_manifest(storage: CheckpointFiles, name: str) -> Manifest:
    """The verified manifest of the checkpoint ``name``."""
    with _found(storage, name, MANIFEST_FILE) as source:
        if source.size > _LONGEST_MANIFEST:
            raise DamagedError(f"checkpoint {name}: its manifest has {source.size} bytes, more than any can have")
        content = bytearray(source.size)
        if not source.read_into(memoryview(content), 0):
            raise DamagedError(f"checkpoint {name}: {MANIFEST_FILE} is cut off")
    return unseal(bytes(content), name)


def read_state(storage: CheckpointFiles, manifest: Manifest, live: LoadInto = LOAD_NEW) -> dict[str, Any]:
    """The state in the checkpoint of ``manifest``; tensors are on the CPU, or the ``live`` ones.

    Live tensors may be overwritten with data that turn out to be damaged: then read another checkpoint, or exit.
    """
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

    def __init__(self, outline: Outline, live: LoadInto) -> None:
        self._skeleton, self._where = outline.skeleton, f"checkpoint {outline.manifest.name}"
        self.files = outline.files()
        found = whole_tensors(self.files, outline.manifest)
        self._held: Mapping[str, Any] = {} if live is LOAD_NEW else self._chosen(found, live)
        fresh = [each for each in found if each.name not in self._held]
        self._fresh = codec.lay_out(fresh) if self._held else found
        self._slabs = codec.allocate(self._fresh)
        self._targets: Mapping[str, ReadTarget] = {}
        if self._held or not self.files[0].alone:
            held = {name: target_of(each) for name, each in self._held.items() if not each.is_meta}
            self._targets = held | targets_in(self._slabs)

    def _chosen(self, found: Sequence[TensorEntry], live: LoadInto) -> Mapping[str, Any]:
        """Those of the ``live`` tensors into which ``found`` ones are read."""
        leaves = codec.outline(self._skeleton, self._where)
        blobs = {str(leaf.tensor) for leaf in leaves.values() if leaf.mark == "blob"}
        fits = live.fits(codec.decode(self._skeleton, codec.without_data(found, blobs), self._where))
        return live.chosen(leaves, found) if fits else {}

    def reads(self, file: TensorFile) -> Iterator[tuple[Sequence[FileRange], Sequence[StagedCopy]]]:
        """What ``file`` has for this state, in its order, in batches of a bounded amount of memory on the way."""
        if self._targets:
            yield from plan(file.record.head_size, file.placed, file.slices(), self._targets)
            return
        yield _as_it_is(file, self._slabs), []

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
        loaded = {**codec.build(self._fresh, self._slabs), **self._held}
        return codec.decode(self._skeleton, loaded, self._where)


def read_skeleton(storage: CheckpointFiles, manifest: Manifest) -> bytearray:
    """The verified structure of the state, without its tensors."""
    return _read_whole(storage, manifest.name, manifest.file(STATE_FILE))


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The verified header of one file of tensors: the positions of its tensors, and their slices."""

    record: FileRecord
    placed: tuple[TensorEntry, ...]
    notes: Mapping[str, Any]
    where: str

    @property
    def alone(self) -> bool:
        """Whether it is the one file, which holds whole tensors only."""
        return self.record.name == TENSORS_FILE

    def slices(self) -> tuple[TensorSlice, ...]:
        return slices_of(self.placed, {} if self.alone else self.notes, self.where)


def read_headers(storage: CheckpointFiles, manifest: Manifest) -> tuple[TensorFile, ...]:
    """The headers of all files of tensors; the data are not read."""
    name, records = manifest.name, manifest.tensor_files()
    return tuple(_parsed(name, record, _read_head(storage, name, record)) for record in records)


def whole_tensors(files: Sequence[TensorFile], manifest: Manifest) -> tuple[TensorEntry, ...]:
    """The tensors that ``files`` make together; DamagedError where one is not complete."""
    if len(files) == 1 and files[0].alone:
        return files[0].placed
    return assemble((each for file in files for each in file.slices()), f"checkpoint {manifest.name}")


def read_tensors(
    storage: CheckpointFiles, manifest: Manifest, wanted: Collection[str]
) -> tuple[tuple[TensorEntry, ...], tuple[Slab, ...]]:
    """The tensors that are ``wanted`` by name, and the memory that holds them. Needs no torch."""
    files = read_headers(storage, manifest)
    found = codec.lay_out([each for each in whole_tensors(files, manifest) if each.name in wanted])
    slabs = codec.allocate(found)
    targets = targets_in(slabs)
    for file in files:
        _fill(storage, manifest.name, file, plan(file.record.head_size, file.placed, file.slices(), targets))
    return found, slabs


def _as_it_is(file: TensorFile, slabs: Sequence[Slab]) -> list[FileRange]:
    """The reads of all of ``file`` to ``slabs``: thousands of tensors need no look at each."""
    begin = file.record.head_size
    return [FileRange(begin + slab.begin, begin + slab.begin + len(slab.view), slab.view) for slab in slabs]


def _fill(
    storage: CheckpointFiles,
    name: str,
    file: TensorFile,
    reads: Iterable[tuple[Sequence[FileRange], Sequence[StagedCopy]]],
) -> None:
    for segments, copies in reads:
        _read_data(storage, name, file, segments)
        for each in copies:
            each.commit()


def read_in_turn(
    storage: CheckpointFiles, manifest: Manifest, wanted: Sequence[TensorEntry]
) -> Iterator[tuple[TensorEntry, Any]]:
    """The ``wanted`` tensors one by one, each with its bytes as a numpy array; a few hundred MB are in memory."""
    start = 0
    while start < len(wanted):
        end, size = start + 1, wanted[start].size
        while end < len(wanted) and size + wanted[end].size <= _IN_TURN:
            size += wanted[end].size
            end += 1
        names = {each.name for each in wanted[start:end]}
        found = codec.arrays(*read_tensors(storage, manifest, names))
        for each in wanted[start:end]:
            yield each, found[each.name]
        start = end


def verify(storage: CheckpointFiles, manifest: Manifest) -> None:
    """Read every byte of the checkpoint of ``manifest`` and compare it; keeps nothing, needs no torch."""
    piece = memoryview(bytearray(PIECE))

    def buffers(begin: int, end: int) -> Iterator[memoryview]:
        return (piece[: min(PIECE, end - start)] for start in range(begin, end, PIECE))

    for record in manifest.files:
        with opened(storage, manifest.name, record) as source:
            for index in range(len(record.chunks)):
                read_chunk(source, manifest.name, record, index, buffers)


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
    return TensorFile(record, *codec.parse_header(head, record.size - record.head_size, where), where)


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


# ---- from boxes in files to boxes in memory, in row-major order


MOST_STAGED = 64 << 20
"""Maximum bytes of copies at a time, unless a single slice has more."""

Put = Callable[[tuple[slice, ...], Any], None]


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """The destination of the box of ``shape`` elements at ``offset`` of a tensor.

    To ``memory`` from byte ``begin`` on, if that is not None. ``put`` places a part: slices within the box, and the
    bytes as a numpy array with the dimensions of the part and one more, the bytes of an element.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    put: Put
    memory: memoryview | None = None
    begin: int = 0


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file from ``begin`` to ``end``, and their destination."""

    begin: int
    end: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """``rows`` of a stored slice, whose part ``chosen`` goes to ``box`` of a target."""

    rows: Any
    chosen: tuple[slice, ...]
    box: tuple[slice, ...]
    put: Put

    def commit(self) -> None:
        self.put(self.box, self.rows[self.chosen])


def plan(
    head_size: int, placed: Sequence[TensorEntry], held: Sequence[TensorSlice], targets: Mapping[str, ReadTarget]
) -> Iterator[tuple[list[FileRange], list[StagedCopy]]]:
    """The reads of a file with the slices ``held``, located at ``placed``, in batches of bounded copies.

    Pieces that are adjacent both in the file and in memory form one segment: thousands of scalars are one read.
    """
    segments: list[FileRange] = []
    copies: list[StagedCopy] = []
    run: tuple[memoryview, int] | None = None  # where the last segment went, and its end there
    for where, part in zip(placed, held, strict=True):
        target = targets.get(part.tensor)
        common = None if target is None or not where.size else _common(part, target)
        if target is None or common is None:
            run = None
            continue
        start = head_size + where.begin
        here = _within(part, common, part.offset, part.shape)
        there = _within(part, common, target.offset, target.shape)
        from_, to = here.span, there.span
        if from_ is None or to is None or target.memory is None:
            copy, begin, end, view = _staged(here, there, target)
            segments.append(FileRange(start + begin, start + end, view))
            copies.append(copy)
            run = None
            if sum(each.rows.nbytes for each in copies) >= MOST_STAGED:
                yield segments, copies
                segments, copies = [], []
            continue
        begin, first, last = start + from_[0], target.begin + to[0], target.begin + to[1]
        if run is not None and run[0] is target.memory and run[1] == first and segments[-1].end == begin:
            begin, first = segments[-1].begin, first - (segments[-1].end - segments[-1].begin)
            segments.pop()
        segments.append(FileRange(begin, start + from_[1], target.memory[first:last]))
        run = (target.memory, last)
    if segments:
        yield segments, copies


def _common(part: TensorSlice, target: ReadTarget) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The intersection of both boxes, as an offset and a shape; None if it is empty."""
    boxes = list(zip(part.offset, part.shape, target.offset, target.shape, strict=True))
    offset = tuple(max(a, b) for a, _, b, _ in boxes)
    shape = tuple(min(a + size, b + other) - max(a, b) for a, size, b, other in boxes)
    return (offset, shape) if all(size > 0 for size in shape) else None


def _within(
    part: TensorSlice,
    common: tuple[tuple[int, ...], tuple[int, ...]],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
) -> TensorSlice:
    """The box ``common`` relative to the box of ``shape`` at ``offset``."""
    moved = tuple(begin - other for begin, other in zip(common[0], offset, strict=True))
    return TensorSlice(part.tensor, part.dtype, shape, moved, common[1])


def _staged(here: TensorSlice, there: TensorSlice, target: ReadTarget) -> tuple[StagedCopy, int, int, memoryview]:
    """The rows of the stored slice that ``here`` needs, and their byte range in it."""
    import numpy as np

    element = ELEMENT_SIZE[here.dtype]
    rows = here.shape[0] if here.shape else 1
    row = math.prod(here.whole[1:]) * element
    begin = here.offset[0] * row if here.offset else 0
    data: Any = np.empty(rows * row, np.uint8)
    box = tuple(slice(begin, begin + size) for begin, size in zip(there.offset, there.shape, strict=True))
    chosen = tuple(slice(begin, begin + size) for begin, size in zip(here.offset, here.shape, strict=True))
    chosen = (slice(None), *chosen[1:]) if chosen else ()
    shaped = data.reshape(rows, *here.whole[1:], element) if here.shape else data
    return StagedCopy(shaped, chosen, box, target.put), begin, begin + rows * row, memoryview(data)


def targets_in(slabs: Sequence[Slab]) -> dict[str, ReadTarget]:
    """The destinations of the data of each tensor in ``slabs``."""
    return {each.name: _target_in(slab, each) for slab in slabs for each in slab.tensors}


def _target_in(slab: Slab, tensor: TensorEntry) -> ReadTarget:
    begin, element = tensor.begin - slab.begin, ELEMENT_SIZE[tensor.dtype]
    array = slab.array[begin : begin + tensor.size].reshape(*tensor.shape, element)

    def put(box: tuple[slice, ...], data: Any) -> None:
        array[box] = data

    return ReadTarget((0,) * len(tensor.shape), tensor.shape, put, slab.view, begin)


def target_of(tensor: torch.Tensor) -> ReadTarget:
    """The destination of this process's data of ``tensor``: the tensor's memory, if that is plain."""
    import torch

    offset = codec.box_of(cast("Any", tensor))[0] if codec.is_sharded(tensor) else (0,) * tensor.dim()
    held = codec.local(tensor)

    def put(box: tuple[slice, ...], data: Any) -> None:
        with torch.no_grad():
            held[box].copy_(torch.from_numpy(data.reshape(-1)).view(held.dtype).view(held[box].shape))

    if held.device.type != "cpu" or not held.is_contiguous() or not held.numel():
        return ReadTarget(offset, tuple(held.shape), put)
    plain: Any = held.reshape(-1).view(torch.uint8).numpy()
    return ReadTarget(offset, tuple(held.shape), put, memoryview(plain))


# ---- parts, for several processes


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One chunk of a file of tensors."""

    record: FileRecord
    index: int

    @property
    def begin(self) -> int:
        return self.record.bound(self.index)[0]

    @property
    def size(self) -> int:
        begin, end = self.record.bound(self.index)
        return end - begin


def parts_of(manifest: Manifest) -> tuple[CheckpointPart, ...]:
    """All data of all tensors, file by file and in their order."""
    return tuple(
        CheckpointPart(each, index) for each in manifest.tensor_files() for index in range(1, len(each.chunks))
    )


class PartReader:
    """Reads parts of the checkpoint of ``manifest`` in ``files``."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest) -> None:
        self._files, self._name = files, manifest.name
        self._sources: dict[str, ByteSource] = {}
        self._lock, self._opened = threading.Lock(), ExitStack()

    def read(self, part: CheckpointPart, into: memoryview) -> None:
        """Fill ``into`` with the verified bytes of ``part``."""
        read_chunk(self._source(part.record), self._name, part.record, part.index, lambda b, e: cut(into))

    def threads(self, part: CheckpointPart) -> int:
        """How many of them may read the file of ``part`` at a time with profit."""
        return self._source(part.record).readers

    def close(self) -> None:
        """When no thread reads any more."""
        self._opened.close()

    def _source(self, record: FileRecord) -> ByteSource:
        with self._lock:
            if record.name not in self._sources:
                found = self._opened.enter_context(opened(self._files, self._name, record))
                self._sources[record.name] = found
            return self._sources[record.name]


class TensorLoader:
    """Copies the parts of a checkpoint, which arrive in order, to their destinations in ``filling``."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._files = {file.record.name: file for file in filling.files}
        self._landing: tuple[str, _FileLoader] | None = None
        """The file whose parts come now: those of a turn may need memory on the way."""

    def put(self, part: CheckpointPart, data: memoryview) -> None:
        name = part.record.name
        if self._landing is None or self._landing[0] != name:
            self._landing = name, _FileLoader(self._filling.reads(self._files[name]))
        self._landing[1].put(part.begin, data)


class _FileLoader:
    """One file of tensors."""

    def __init__(self, turns: Iterator[tuple[Sequence[FileRange], Sequence[StagedCopy]]]) -> None:
        self._turns = turns
        self._segments, self._copies = self._turn()

    def _turn(self) -> tuple[Sequence[FileRange], Sequence[StagedCopy]]:
        self._next = 0
        return next(self._turns, ((), ()))

    def put(self, begin: int, data: memoryview) -> None:
        end = begin + len(data)
        while self._next < len(self._segments):
            each = self._segments[self._next]
            first, last = max(begin, each.begin), min(end, each.end)
            if first < last:
                each.view[first - each.begin : last - each.begin] = data[first - begin : last - begin]
            if end < each.end:
                return
            self._next += 1
            if self._next == len(self._segments):
                for copy in self._copies:
                    copy.commit()
                self._segments, self._copies = self._turn()
