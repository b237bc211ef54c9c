"""Copies of states in memory, before they are written: a save copies the state here, and training continues.

There are two slots: one is written to storage while the next state is copied into the other. Fresh memory costs several
times the copy itself (the kernel clears each page at its first use), so slots are reused. A slot is an unnamed memory
file. If the node's agent holds the files, their contents outlive this process:

==========  ===========================================================================
bytes       content
==========  ===========================================================================
0 to 4095   the seal: ``_SEAL`` (magic, position, size and XXH3-128 of the notes)
4096 on     the checkpoint's files in the order of the manifest, each from a multiple of 4096 on
behind it   the notes: JSON with the checkpoint's location, its job, and its manifest
==========  ===========================================================================

*Runs in* the thread that saves (``hold``), one that prepares, and the writing ones (``seal``, ``release``); in a
successor of the process and in the node's agent (``read``).
*Owns* the slots. *Fails by* NoRoomError if the machine has too little memory left; DamagedError if a seal or notes have
changed since they were written.
*Invariant*: a held slot's bytes do not change until it is released; the slot of the newest sealed state is reused last.
A file with a valid seal matches its manifest, unless a checksum of the manifest shows otherwise.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import xxhash

from elastic_trainer.checkpoint.manifest import (
    PIECE,
    DamagedError,
    FileImage,
    FileRecord,
    Image,
    Manifest,
    OnDevice,
    parse_checkpoint,
    part_of,
    seal,
    unseal,
)
from elastic_trainer.checkpoint.storage.posix import read_into
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger

# ---- the slots


SLOTS = 2
MEMORY_NAME = "elastic-trainer-"
"""What the names of memory files begin with."""
KEPT_FREE = 256 << 20
"""Bytes of memory that a new slot leaves to others."""
_PAGE = mmap.PAGESIZE
_ROUNDED = 2 << 20
_TOUCHED = 4 << 20
"""Bytes touched at a time, during which this process cannot map other memory."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14; Python does not name it."""


class NoRoomError(Exception):
    """There is no memory for a slot."""


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of an image in slot ``slot``, complete once ``arrived()`` returns: a device may still be writing."""

    slot: int
    image: Image
    arrived: Callable[[], None]


class Arena:
    """See the module. ``files`` are the agent's memory files; without them the slots die with this process.

    ``beside`` are those of the other ranks of a sharded state: a state that all of them hold is whole.
    """

    def __init__(self, files: Sequence[Path] = (), cuda: Cuda | None = None, beside: Sequence[Path] = ()) -> None:
        cuda = cuda if cuda is not None else Cuda()
        self._slots = _opened(files, cuda)
        self.lasting = bool(self._slots)
        """Whether the slots outlive this process."""
        if not self._slots:
            self._slots = [_Slot(os.memfd_create(f"{MEMORY_NAME}checkpoint"), cuda) for _ in range(SLOTS)]
        self._beside = _looked_at(beside) if self.lasting else ()
        self._paths = dict(zip(self._descriptors(), map(str, (*files, *beside)), strict=False)) if self.lasting else {}
        self._free = sorted(range(SLOTS), key=self._worth()) if self.lasting else list(range(SLOTS))

    def _worth(self) -> Callable[[int], Any]:
        """The sort key of a slot: slots with newer parts come later, and parts of the newest whole state last."""
        descriptors = [slot.descriptor for slot in self._slots]
        memories = [LocalMemory(slot.descriptor) for slot in self._slots]
        own = {each.memory: each.order for each in _sound(descriptors)}
        newest = self.newest()
        whole = newest.memories if newest is not None else ()
        return lambda slot: (memories[slot] in whole, own.get(memories[slot], (-1, -1)))

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def size(self) -> int:
        """Bytes of memory of all slots."""
        return sum(slot.size for slot in self._slots)

    def newest(self) -> StateSnapshot | None:
        """The newest whole state in the slots, of this process or an earlier one; None if there is none."""
        return newest(self._descriptors())

    def parts(self) -> list[tuple[str, StateSnapshot]]:
        """The parts of sharded states in the agent's memory, each with the path of its file."""
        found = [each for each in _sound([*self._paths]) if each.shard is not None]
        return [(self._paths[each.memory.descriptor], each) for each in found if isinstance(each.memory, LocalMemory)]

    def reuse_last(self, name: str) -> None:
        """The job has resumed the snapshot ``name``: until there is another one, keep it rather than newer ones."""
        held = {each.memory for each in _sound(self._descriptors()) if each.manifest.name == name}
        self._free.sort(key=lambda slot: LocalMemory(self._slots[slot].descriptor) in held)

    def descriptor(self, held: Held) -> int:
        """The memory file of the copy."""
        return self._slots[held.slot].descriptor

    def _descriptors(self) -> list[int]:
        return [*(slot.descriptor for slot in self._slots), *self._beside]

    def prepare(self, size: int, *, pinned: bool = False) -> None:
        """Allocate slots of ``size`` bytes, as far as memory allows. Any thread; keeps the contents of slots."""
        with suppress(NoRoomError):
            for slot in self._slots:
                slot.grow(size)
                if pinned:
                    slot.pin()

    def hold(self, image: Image) -> Held:
        """Copy ``image`` into the free slot to be reused first. RuntimeError if all are held."""
        if not self._free:
            raise RuntimeError("all slots are held")
        number = self._free[0]
        slot = self._slots[number]
        slot.fit(file_begins([each.size for each in image.files])[-1])
        copied, arrived = slot.copy(image)
        self._free.remove(number)
        return Held(number, copied, arrived)

    def release(self, held: Held, *, sealed: bool = True) -> None:
        """Free the slot. A slot that was never sealed is reused first: the other may hold a state."""
        self._free.insert(len(self._free) if sealed else 0, held.slot)

    def close(self) -> None:
        """Free the memory; no slot may be held any more."""
        for slot in self._slots:
            slot.close()
        beside, self._beside = self._beside, ()
        for each in beside:
            os.close(each)


def newest(descriptors: Sequence[int]) -> StateSnapshot | None:
    """The newest whole snapshot in these memory files; logs and skips damaged ones."""
    return max(whole_states(_sound(descriptors)), key=lambda each: each.order, default=None)


def _sound(descriptors: Sequence[int]) -> list[StateSnapshot]:
    """The snapshots in these memory files, whole or a rank's part."""
    found: list[StateSnapshot] = []
    for descriptor in descriptors:
        try:
            snapshot = read(descriptor)
        except (CheckpointError, OSError, ValueError) as error:
            logger().warning("snapshot.damaged", reason=str(error))
            continue
        if snapshot is not None:
            found.append(snapshot)
    return found


def _opened(files: Sequence[Path], cuda: Cuda) -> list[_Slot]:
    """The agent's slots; none if they cannot be opened."""
    slots: list[_Slot] = []
    try:
        slots.extend(_Slot(os.open(path, os.O_RDWR | os.O_CLOEXEC), cuda) for path in files)
    except OSError as error:
        logger().warning("snapshot.memory_refused", reason=str(error), effect="snapshots end with this process")
        for slot in slots:
            slot.close()
        return []
    return slots


def _looked_at(files: Sequence[Path]) -> tuple[int, ...]:
    with suppress(OSError):
        return tuple(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in files)
    return ()


class _Slot:
    """Memory for one image; its pages are touched once, at the first use."""

    def __init__(self, descriptor: int, cuda: Cuda) -> None:
        self.descriptor, self._cuda = descriptor, cuda
        self.size = 0
        """Mapped bytes."""
        self._memory: mmap.mmap | None = None
        self._array: Any = None
        self._pinned: bool | None = None
        """None before the first attempt."""
        self._growing = threading.RLock()

    def fit(self, needed: int) -> None:
        """Resize to ``needed`` bytes and discard the contents."""
        self.grow(needed)
        break_seal(self.descriptor)

    def grow(self, needed: int) -> None:
        """Grow to ``needed`` bytes and keep the contents. NoRoomError if there is too little memory."""
        with self._growing:
            if self.descriptor >= 0 and self.size < needed:
                self._grow(needed)

    def _grow(self, needed: int) -> None:
        size = max(_ROUNDED, -(-needed // _ROUNDED) * _ROUNDED)
        there = os.fstat(self.descriptor).st_size
        free = available()
        if there < size and free < size - there + KEPT_FREE:
            raise NoRoomError(f"{size / 1e6:,.0f} MB of memory are needed; {free / 1e6:,.0f} MB are left")
        self._unmap()
        try:
            os.ftruncate(self.descriptor, max(size, there))
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise NoRoomError(f"{size / 1e6:,.0f} MB of memory cannot be allocated: {error.strerror}") from error
        self.size, self._array = size, _array(self._memory)
        _touch(self._array)

    def pin(self) -> None:
        """Pin the memory so that devices write to it directly; if that is refused, copies from them are slower."""
        with self._growing:
            if self._pinned is None and self._array is not None:
                self._pinned = self._cuda.pin(self._array)
                if not self._pinned:
                    logger().warning("snapshot.not_pinned", bytes=self.size, effect="copies from the GPU take longer")

    def copy(self, image: Image) -> tuple[Image, Callable[[], None]]:
        """Copy the files of ``image``, each aligned to a page; the copy, and a function that waits for its arrival."""
        with self._growing:  # :meth:`Arena.prepare` may be about to map larger memory
            return self._copy(image)

    def _copy(self, image: Image) -> tuple[Image, Callable[[], None]]:
        files, parts = [], Parts(self._array)
        for file, begin in zip(image.files, file_begins([each.size for each in image.files]), strict=False):
            position = begin + len(file.head)
            self._array[begin:position] = _array(file.head) if file.head else 0
            end = position + file.body_size
            body = memoryview(self._memory)[position:end]  # type: ignore[arg-type]
            for view in (file.parts or file.body)():
                parts.add(position, view)
                position += len(view)
            if position != end:
                came = position - begin - len(file.head)
                raise RuntimeError(f"{file.name}: received {came} of {file.body_size} bytes")
            files.append(FileImage(file.name, file.head, file.body_size, lambda body=body: (body,)))  # type: ignore[misc]
        if parts.on_device:
            self.pin()
        arrived = parts.queue(self._cuda) if parts.on_device else lambda: None
        parts.copy()
        return Image(tuple(files), image.watched), arrived

    def close(self) -> None:
        """Close; the kernel frees the memory with its last view and last descriptor."""
        with self._growing:
            self._unmap()
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1

    def _unmap(self) -> None:
        if self._pinned:
            self._cuda.unpin(self._array)
        self.size, self._array, self._memory, self._pinned = 0, None, None, None


def _touch(array: Any) -> None:
    """Make the kernel allocate the pages now. mmap.madvise would hold the interpreter lock and stop all threads."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin in range(0, len(array), _TOUCHED):
        part = array[begin : begin + _TOUCHED]
        if madvise(part.ctypes.data, len(part), _POPULATE_WRITE):  # an older kernel: reading makes pages too
            part[::_PAGE].max()


def _array(data: Any) -> Any:
    """``data`` as a numpy array: numpy copies as fast as memcpy, and releases the interpreter lock meanwhile."""
    import numpy as np

    return np.frombuffer(data, np.uint8)


GROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes of memory that this process may still allocate, by the machine and its cgroup."""
    of_machine, of_group = psutil.virtual_memory().available, _of_group(GROUP)
    return of_machine if of_group is None else min(of_machine, of_group)


def _of_group(root: Path) -> int | None:
    """Bytes left below the limit of a cgroup; None without one."""
    found = group_memory(root)
    return None if found is None else found[1] - found[0]


def group_memory(root: Path) -> tuple[int, int] | None:
    """Bytes used, and memory.max, of a cgroup (v2); None without a limit. Reclaimable file pages count as free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text())
        return used - int(statistics.get("inactive_file", "0")), int(limit)
    except (OSError, ValueError):
        return None


# ---- copying into a slot


_SLICE = 4 << 20
"""Bytes that one thread copies at a time."""
_WORTHWHILE = 32 << 20
"""Below this size, starting a thread costs more than it saves."""
_MOST_THREADS = 4
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices of this process."""


class Cuda:
    """The calls of CUDA that copies take, written to torch's documentation: no test of this project has run them."""

    def pin(self, memory: Any) -> bool:
        """Pin the array ``memory``, so that a device can write to it directly; False if refused."""
        return int(_runtime().cudaHostRegister(memory.ctypes.data, len(memory), _PORTABLE)) == 0

    def unpin(self, memory: Any) -> None:
        """Unpin the array; no device may write to it any more."""
        import torch

        torch.cuda.synchronize()
        _runtime().cudaHostUnregister(memory.ctypes.data)

    def queue(self, target: Any, data: Any) -> None:
        """Copy the tensor ``data`` into the array ``target`` after all earlier work of its device."""
        import torch

        torch.from_numpy(target).copy_(data, non_blocking=True)

    def record(self, devices: Iterable[Any]) -> Callable[[], None]:
        """Returns a function that waits, in any thread, until all work queued on ``devices`` is done."""
        import torch

        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for each in events:
                each.synchronize()

        return wait


def _runtime() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Parts:
    """The pieces to copy, and their positions in the byte array ``target``."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._on_device: list[tuple[int, OnDevice]] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._size = 0

    @property
    def on_device(self) -> bool:
        return bool(self._on_device)

    def add(self, position: int, view: memoryview | OnDevice) -> None:
        if isinstance(view, OnDevice):
            self._on_device.append((position, view))
            return
        array = _array(view)
        self._size += len(array)
        for start in range(0, len(array), _SLICE):
            self._waiting.append((position + start, array[start : start + _SLICE]))

    def queue(self, cuda: Cuda) -> Callable[[], None]:
        """Start to copy the pieces on devices; returns a function that waits for the end."""
        for position, part in self._on_device:
            cuda.queue(self._target[position : position + len(part)], part.data)
        return cuda.record({part.data.device for _, part in self._on_device})

    def copy(self) -> None:
        others = min(_MOST_THREADS, len(os.sched_getaffinity(0))) - 1
        if self._size < _WORTHWHILE or others < 1:
            self._run()
            return
        with ThreadPoolExecutor(others, thread_name_prefix="checkpoint-copy") as pool:
            helping = [pool.submit(self._run) for _ in range(others)]
            self._run()
        for each in helping:
            each.result()

    def _run(self) -> None:
        while self._waiting:
            try:
                position, array = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            self._target[position : position + len(array)] = array


# ---- a memory file and its seal


DATA = 4096
"""Where the files begin."""
_MAGIC, _STORED = b"ELTSNAP1", b"COMMITED"
_SEAL = struct.Struct("<8sQQ16s8s")
_LONGEST_NOTES = 256 << 20


class SnapshotMemory(Protocol):
    """A memory file, of this machine or another one."""

    def read_into(self, buffer: memoryview, position: int) -> bool:
        """Fill ``buffer`` from ``position`` on; False if the file ends before. OSError if it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The memory file ``descriptor``."""

    descriptor: int

    def read_into(self, buffer: memoryview, position: int) -> bool:
        return read_into(self.descriptor, buffer, position)


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A state in ``memory``; the job ``job`` was to save it at ``location``."""

    memory: SnapshotMemory
    manifest: Manifest
    location: str
    job: str | None
    stored: bool
    """Whether its process has committed it there."""
    parts: tuple[StateSnapshot, ...] = ()
    """For a sharded state: the snapshots of its shard ranks, whose files together are those of this one."""

    @property
    def order(self) -> tuple[int, int]:
        """Snapshots and checkpoints are ordered by this: the round and the step."""
        return self.manifest.round, self.manifest.step

    def image(self) -> Image:
        """Its files, read when they are written."""
        return Image(tuple(self._holder(record.name)._file(record) for record in self.manifest.files))

    @property
    def memories(self) -> frozenset[SnapshotMemory]:
        """The memory files that hold it."""
        return frozenset(each.memory for each in self.parts or (self,))

    @property
    def shard(self) -> tuple[int, int] | None:
        """Whose part of a sharded state it is, and of how many; None for a whole state."""
        return part_of(self._names())

    def _holder(self, file: str) -> StateSnapshot:
        return next((part for part in self.parts if file in part._names()), self)

    def _names(self) -> list[str]:
        return [each.name for each in self.manifest.files]

    def _file(self, record: FileRecord) -> FileImage:
        begin = self._begin(record.name)
        head = bytearray(record.head_size)
        if not self.memory.read_into(memoryview(head), begin):
            raise DamagedError(f"snapshot {self.manifest.name}: {record.name} is cut off")
        start, end = begin + record.head_size, begin + record.size
        return FileImage(record.name, bytes(head), end - start, lambda: _pieces(self.memory, start, end))

    # ---- as the files that a reader opens

    def exists(self, name: str) -> bool:
        return name == self.manifest.name

    def source(self, name: str, file: str) -> SnapshotSource:
        holder = self._holder(file)
        return SnapshotSource(holder.memory, holder._begin(file), self.manifest.file(file).size)

    def _begin(self, file: str) -> int:
        begins = file_begins([each.size for each in self.manifest.files])
        return begins[self._names().index(file)]


class SnapshotSource:
    """One file of a snapshot, read by position."""

    readers = 1

    def __init__(self, memory: SnapshotMemory, begin: int, size: int) -> None:
        self._memory, self._begin, self.size = memory, begin, size

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """See :class:`~elastic_trainer.checkpoint.storage.ByteSource`."""
        return self._memory.read_into(buffer, self._begin + offset)

    def close(self) -> None:
        """The memory stays open."""


def whole_states(found: Iterable[StateSnapshot]) -> Iterator[StateSnapshot]:
    """The snapshots of ``found`` with a whole state; all ranks of a sharded state are merged into one snapshot."""
    groups: dict[Any, dict[int, StateSnapshot]] = {}
    for each in found:
        where = each.shard
        if where is None:
            yield each
            continue
        index, count = where
        parts = groups.setdefault((each.order, each.location, each.job, count), {})
        parts[index] = each
        if len(parts) == count:
            copies = tuple(parts[number] for number in range(count))
            first, files = copies[0], tuple(record for part in copies for record in part.manifest.files)
            manifest = first.manifest.with_files(files)
            yield StateSnapshot(first.memory, manifest, first.location, first.job, first.stored, copies)


def file_begins(sizes: Sequence[int]) -> list[int]:
    """Where files of these ``sizes`` begin, and where the notes do.

    In a slot a file's data lie in pages as they will in the file, so that they can be written from there directly.
    """
    return list(itertools.accumulate((-(-size // DATA) * DATA for size in sizes), initial=DATA))


def break_seal(descriptor: int) -> None:
    """Invalidate the file before it is filled: it holds nothing until it is sealed again."""
    os.pwrite(descriptor, bytes(_SEAL.size), 0)


def seal_as(descriptor: int, manifest: Manifest, location: str, job: str | None) -> None:
    """Seal the file as holding the files of ``manifest``, which others may use if this process dies."""
    text, begin = notes(manifest, location, job), file_begins([each.size for each in manifest.files])[-1]
    os.pwrite(descriptor, text, begin)
    digest = xxhash.xxh3_128_digest(text)
    os.pwrite(descriptor, _SEAL.pack(_MAGIC, begin, len(text), digest, bytes(8)), 0)


def mark_stored(descriptor: int) -> None:
    """Mark the contents of the file as committed."""
    os.pwrite(descriptor, _STORED, _SEAL.size - len(_STORED))


def read(descriptor: int) -> StateSnapshot | None:
    """The snapshot in the file; None while it is incomplete. Its data are verified when they are read."""
    header = os.pread(descriptor, _SEAL.size, 0)
    if len(header) < _SEAL.size or not any(header):
        return None
    magic, begin, size, digest, mark = _SEAL.unpack(header)
    text = os.pread(descriptor, size, begin) if magic == _MAGIC and size <= _LONGEST_NOTES else b""
    if not text or xxhash.xxh3_128_digest(text) != digest or mark not in (bytes(8), _STORED):
        if os.pread(descriptor, _SEAL.size, 0) != header:
            return None  # it is being filled
        raise DamagedError("a snapshot in memory is damaged: its seal does not match its notes")
    return described(LocalMemory(descriptor), text, stored=mark == _STORED)


def described(memory: SnapshotMemory, notes: bytes, *, stored: bool) -> StateSnapshot:
    """The snapshot in ``memory`` with these :func:`notes`."""
    known = json.loads(notes)
    if parse_checkpoint(known["name"]) is None:
        raise DamagedError(f"a snapshot in memory has the name {known['name']!r}, which no checkpoint has")
    manifest = unseal(known["manifest"].encode(), known["name"])
    return StateSnapshot(memory, manifest, known["location"], known["job"], stored)


def notes(manifest: Manifest, location: str, job: str | None) -> bytes:
    """The description of a snapshot with the files of ``manifest``."""
    text = {"location": location, "job": job, "name": manifest.name, "manifest": seal(manifest).decode()}
    return json.dumps(text).encode()


def extent(descriptor: int) -> tuple[bytes, int]:
    """The seal of a sealed file, and where its notes end."""
    header = os.pread(descriptor, _SEAL.size, 0)
    _, begin, size, _, _ = _SEAL.unpack(header)
    return header, begin + size


def reseal(descriptor: int, header: bytes, end: int) -> None:
    """Seal a copy of another file with its seal. ValueError unless that is one of a file which ends at ``end``."""
    magic, begin, size, _, _ = _SEAL.unpack(header[: _SEAL.size].ljust(_SEAL.size))
    if len(header) != _SEAL.size or magic != _MAGIC or begin + size != end:
        raise ValueError("a copy of a snapshot without its seal")
    os.pwrite(descriptor, header, 0)


def _pieces(memory: SnapshotMemory, start: int, end: int) -> Iterator[memoryview]:
    while start < end:
        piece = memoryview(bytearray(min(PIECE, end - start)))
        if not memory.read_into(piece, start):
            raise DamagedError("a snapshot in memory is cut off")
        yield piece
        start += len(piece)
