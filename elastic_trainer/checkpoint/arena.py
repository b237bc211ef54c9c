"""Memory for the files of checkpoints that are about to be written: a save copies them here, and training goes on.

Two slots: one is being written to storage while the next state is copied into the other. Fresh memory costs several
times the copy itself (the kernel clears each page as it is touched), so slots are kept and used again. A slot is a
memory file without a name. Where the node's agent holds them, what they hold outlives this process: see snapshot.

*Runs in* the thread that saves (``hold``), one that prepares, and those that write (``seal``, ``release``).
*Owns* the slots. *Fails by* NoRoomError where the machine has not enough memory left.
*Invariant*: a held slot's bytes do not change until it is released; the newest sealed one is filled last.
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
from elastic_trainer.checkpoint.snapshot import StateSnapshot, break_seal, mark_stored, places, read, seal_as, whole
from elastic_trainer.errors import CheckpointError
from elastic_trainer.telemetry.logs import logger

SLOTS = 2
_NAME = "elastic-trainer-checkpoint"
KEPT_FREE = 256 << 20
"""Memory that a new slot leaves to others."""
_PAGE = mmap.PAGESIZE
_ROUNDED = 2 << 20
_TOUCHED = 4 << 20
"""Bytes touched at a time: meanwhile this process cannot map other memory."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14; Python does not name it."""


class NoRoomError(Exception):
    """There is no memory for a slot."""


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of an image in slot ``slot``, whole when ``arrived()`` has returned: a device may still be writing."""

    slot: int
    image: Image
    arrived: Callable[[], None]


class Arena:
    """See the module. ``files`` are the agent's memory files; without them the slots end with this process.

    ``beside`` are those of the other places of a sharded state: one that all of them hold is whole.
    """

    def __init__(self, files: Sequence[Path] = (), cuda: Cuda | None = None, beside: Sequence[Path] = ()) -> None:
        cuda = cuda if cuda is not None else Cuda()
        self._slots = _opened(files, cuda)
        self.lasting = bool(self._slots)
        """Whether the slots outlive this process."""
        if not self._slots:
            self._slots = [_Slot(os.memfd_create(_NAME), cuda) for _ in range(SLOTS)]
        self._beside = _looked_at(beside) if self.lasting else ()
        self._free = sorted(range(SLOTS), key=self._worth()) if self.lasting else list(range(SLOTS))

    def _worth(self) -> Callable[[int], Any]:
        """Of a slot, for an order in which a part of the newest whole state comes last, then the newest part."""
        descriptors = [slot.descriptor for slot in self._slots]
        own = {each.descriptor: each.order for each in _sound(descriptors)}
        newest = self.newest()
        whole = newest.descriptors if newest is not None else ()
        return lambda slot: (descriptors[slot] in whole, own.get(descriptors[slot], (-1, -1)))

    @property
    def full(self) -> bool:
        """Whether all slots are held."""
        return not self._free

    @property
    def size(self) -> int:
        """Bytes of memory that the slots take."""
        return sum(slot.size for slot in self._slots)

    def newest(self) -> StateSnapshot | None:
        """The newest whole state in the slots, of this process or one before it; None if there is none."""
        return newest([*(slot.descriptor for slot in self._slots), *self._beside])

    def prepare(self, size: int, *, pinned: bool = False) -> None:
        """Have slots for ``size`` bytes, as far as there is memory. Any thread; what slots hold does not change."""
        with suppress(NoRoomError):
            for slot in self._slots:
                slot.grow(size)
                if pinned:
                    slot.pin()

    def hold(self, image: Image) -> Held:
        """Copy ``image`` into the slot that was released first. RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError("all slots are held")
        number = self._free[0]
        slot = self._slots[number]
        slot.fit(room(image))
        copied, arrived = slot.copy(image)
        self._free.remove(number)
        return Held(number, copied, arrived)

    def seal(self, held: Held, manifest: Manifest, location: str, job: str | None) -> None:
        """The copy is whole, as ``manifest`` says; if this process ends, others may use it."""
        seal_as(self._slots[held.slot].descriptor, manifest, location, job)

    def mark_stored(self, held: Held) -> None:
        """The copy is committed."""
        mark_stored(self._slots[held.slot].descriptor)

    def release(self, held: Held, *, sealed: bool = True) -> None:
        """The copy is not needed any more. One that was never sealed is filled first: the others may hold a state."""
        self._free.insert(len(self._free) if sealed else 0, held.slot)

    def close(self) -> None:
        """Give the memory back; nothing is held any more."""
        for slot in self._slots:
            slot.close()
        beside, self._beside = self._beside, ()
        for each in beside:
            os.close(each)


def room(image: Image) -> int:
    """Bytes that a slot needs for ``image``."""
    return places([each.size for each in image.files])[-1]


def newest(descriptors: Sequence[int]) -> StateSnapshot | None:
    """The newest whole snapshot in these memory files; damaged ones are logged and passed over."""
    return max(whole(_sound(descriptors)), key=lambda each: each.order, default=None)


def _sound(descriptors: Sequence[int]) -> list[StateSnapshot]:
    """What these memory files hold, whole or a place's part."""
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
    """Memory for one image; its pages are touched once, when they are first needed."""

    def __init__(self, descriptor: int, cuda: Cuda) -> None:
        self.descriptor, self._cuda = descriptor, cuda
        self.size = 0
        """Bytes that are mapped here."""
        self._memory: mmap.mmap | None = None
        self._array: Any = None
        self._pinned: bool | None = None
        """None until that was tried."""
        self._growing = threading.Lock()

    def fit(self, needed: int) -> None:
        """Have that many bytes. Whatever it held is gone."""
        self.grow(needed)
        break_seal(self.descriptor)

    def grow(self, needed: int) -> None:
        """Have that many bytes; what it holds stays. NoRoomError if there is no memory for it."""
        with self._growing:
            if self.descriptor >= 0 and self.size < needed:
                self._grow(needed)

    def _grow(self, needed: int) -> None:
        size = max(_ROUNDED, -(-needed // _ROUNDED) * _ROUNDED)
        there = os.fstat(self.descriptor).st_size
        free = available()
        if free is not None and there < size and free < size - there + KEPT_FREE:
            raise NoRoomError(f"{size / 1e6:,.0f} MB of memory are needed, and {free / 1e6:,.0f} MB are left")
        self._unmap()
        try:
            os.ftruncate(self.descriptor, max(size, there))
            self._memory = mmap.mmap(self.descriptor, size)
        except OSError as error:
            raise NoRoomError(f"{size / 1e6:,.0f} MB of memory cannot be had: {error.strerror}") from error
        self.size, self._array = size, _array(self._memory)
        _touch(self._array)

    def pin(self) -> None:
        """Have devices write here without a detour; where that is refused, copies from them are slower."""
        with self._growing:
            if self._pinned is None and self._array is not None:
                self._pinned = self._cuda.pin(self._array)
                if not self._pinned:
                    logger().warning("snapshot.not_pinned", bytes=self.size, effect="copies from the GPU take longer")

    def copy(self, image: Image) -> tuple[Image, Callable[[], None]]:
        """The bytes of ``image``: its files, each from the beginning of a page on; and what waits for their arrival."""
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
                raise RuntimeError(f"{file.name}: {came} bytes came, {file.body_size} were announced")
            files.append(FileImage(file.name, file.head, file.body_size, lambda body=body: (body,)))  # type: ignore[misc]
        if parts.on_device:
            self.pin()
        arrived = parts.queue(self._cuda) if parts.on_device else _at_once
        parts.copy()
        return Image(tuple(files), image.watched), arrived

    def close(self) -> None:
        """The kernel takes the memory back when the last view and the last descriptor of it are gone."""
        with self._growing:
            self._unmap()
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1

    def _unmap(self) -> None:
        if self._pinned:
            self._cuda.unpin(self._array)
        self.size, self._array, self._memory, self._pinned = 0, None, None, None


def _at_once() -> None:
    """Nothing is under way."""


def _touch(array: Any) -> None:
    """Have the kernel give the pages now. mmap.madvise would keep the interpreter's lock, so that no thread runs."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin in range(0, len(array), _TOUCHED):
        part = array[begin : begin + _TOUCHED]
        if madvise(part.ctypes.data, len(part), _POPULATE_WRITE):  # an older kernel: reading makes pages too
            part[::_PAGE].max()


def _array(data: Any) -> Any:
    """numpy copies as fast as memcpy, and lets other threads run meanwhile."""
    import numpy as np

    return np.frombuffer(data, np.uint8)


def available() -> int | None:
    """Bytes of memory that this process may still take, by the machine and its control group; None if unknown."""
    found = [each for each in (_of_machine(), _of_group(Path("/sys/fs/cgroup"))) if each is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_group(root: Path) -> int | None:
    """What memory.max leaves (cgroup v2). Pages of files that nobody needs can be had back."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text())
        return int(limit) - used + int(statistics.get("inactive_file", "0"))
    except (OSError, ValueError):
        return None
