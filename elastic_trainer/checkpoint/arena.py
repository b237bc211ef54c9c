"""Memory for the files of checkpoints before they are written: a save copies them here, and training continues.

There are two slots: one is written to storage while the next state is copied into the other. Fresh memory costs several
times the copy itself (the kernel clears each page at its first use), so slots are reused. A slot is an unnamed memory
file. If the node's agent holds the files, their contents outlive this process: see snapshot.

*Runs in* the thread that saves (``hold``), one that prepares, and the writing ones (``seal``, ``release``).
*Owns* the slots. *Fails by* NoRoomError if the machine has too little memory left.
*Invariant*: a held slot's bytes do not change until it is released; the slot of the newest sealed state is reused last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint.copying import Cuda, Parts
from elastic_trainer.checkpoint.image import FileImage, Image
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.snapshot import (
    LocalMemory,
    StateSnapshot,
    break_seal,
    mark_stored,
    places,
    read,
    seal_as,
    whole,
)
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger

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

    ``beside`` are those of the other places of a sharded state: a state that all of them hold is whole.
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
        """Whether all slots are held."""
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
        found = [each for each in _sound([*self._paths]) if each.place is not None]
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
        slot.fit(room(image))
        copied, arrived = slot.copy(image)
        self._free.remove(number)
        return Held(number, copied, arrived)

    def seal(self, held: Held, manifest: Manifest, location: str, job: str | None) -> None:
        """Mark the copy complete, as described by ``manifest``; if this process dies, others may use it."""
        seal_as(self._slots[held.slot].descriptor, manifest, location, job)

    def mark_stored(self, held: Held) -> None:
        """Mark the copy committed."""
        mark_stored(self._slots[held.slot].descriptor)

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


def room(image: Image) -> int:
    """Bytes that a slot needs for ``image``."""
    return places([each.size for each in image.files])[-1]


def newest(descriptors: Sequence[int]) -> StateSnapshot | None:
    """The newest whole snapshot in these memory files; logs and skips damaged ones."""
    return max(whole(_sound(descriptors)), key=lambda each: each.order, default=None)


def _sound(descriptors: Sequence[int]) -> list[StateSnapshot]:
    """The snapshots in these memory files, whole or a place's part."""
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
        if free is not None and there < size and free < size - there + KEPT_FREE:
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
        for file, begin in zip(image.files, places([each.size for each in image.files]), strict=False):
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


def available() -> int | None:
    """Bytes of memory that this process may still allocate, by the machine and its cgroup; None if unknown."""
    found = [each for each in (_of_machine(), _of_group(Path("/sys/fs/cgroup"))) if each is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_group(root: Path) -> int | None:
    """Bytes left below memory.max (cgroup v2). Reclaimable file pages count as free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text())
        return int(limit) - used + int(statistics.get("inactive_file", "0"))
    except (OSError, ValueError):
        return None
