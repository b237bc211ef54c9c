"""Memory for the files of checkpoints that are about to be written: a save copies them here, and training goes on.

Two slots: one is being written to storage while the next state is copied into the other. Fresh memory costs several
times the copy itself (the kernel clears each page as it is touched), so slots are kept and used again. The memory is a
file without a name, shared, so that another process can hold it too.

*Runs in* the thread that saves (``hold``) and the one that writes (``release``). *Owns* the slots.
*Fails by* NoRoomError where the machine has not enough memory left.
*Invariant*: a held slot's bytes do not change until it is released.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint.image import FileImage, Image

SLOTS = 2
KEPT_FREE = 256 << 20
"""Memory that a new slot leaves to others."""
_PAGE = mmap.PAGESIZE
_ROUNDED = 2 << 20
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14; Python does not name it."""


class NoRoomError(Exception):
    """There is no memory for a slot."""


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of an image in slot ``slot``."""

    slot: int
    image: Image


class Arena:
    """See the module."""

    def __init__(self) -> None:
        self._slots: list[_Slot | None] = [None] * SLOTS
        self._free = list(range(SLOTS))

    @property
    def full(self) -> bool:
        """Whether all slots are held."""
        return not self._free

    @property
    def size(self) -> int:
        """Bytes of memory that the slots take."""
        return sum(slot.size for slot in self._slots if slot is not None)

    def hold(self, image: Image) -> Held:
        """Copy ``image`` into a free slot. RuntimeError if there is none."""
        if not self._free:
            raise RuntimeError("all slots are held")
        number = self._free[-1]
        slot = self._slots[number]
        if slot is None or slot.size < image.size:
            if slot is not None:
                slot.close()
            self._slots[number] = None
            slot = self._slots[number] = _Slot(image.size)
        copied = slot.copy(image)
        self._free.remove(number)
        return Held(number, copied)

    def release(self, held: Held) -> None:
        """The copy is not needed any more."""
        self._free.append(held.slot)

    def close(self) -> None:
        """Give the memory back; nothing is held any more."""
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._slots = [None] * SLOTS


class _Slot:
    """Memory for one image; its pages are touched once, here."""

    def __init__(self, size: int) -> None:
        self.size = max(_ROUNDED, -(-size // _ROUNDED) * _ROUNDED)
        free = available()
        if free is not None and free < self.size + KEPT_FREE:
            raise NoRoomError(f"{self.size / 1e6:,.0f} MB of memory are needed, and {free / 1e6:,.0f} MB are left")
        descriptor = os.memfd_create("elastic-trainer-checkpoint")
        try:
            os.ftruncate(descriptor, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        except OSError as error:
            raise NoRoomError(f"{self.size / 1e6:,.0f} MB of memory cannot be had: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self._array = _array(self._memory)
        try:
            self._memory.madvise(_POPULATE_WRITE)
        except OSError:  # an older kernel
            self._array[::_PAGE] = 0

    def copy(self, image: Image) -> Image:
        """The bytes of ``image``, one file behind the other."""
        files, position = [], 0
        for file in image.files:
            begin = position
            for view in file.body():
                self._array[position : position + len(view)] = _array(view)
                position += len(view)
            if position - begin != file.body_size:
                raise RuntimeError(f"{file.name}: {position - begin} bytes came, {file.body_size} were announced")
            body = memoryview(self._memory)[begin:position]
            files.append(FileImage(file.name, file.head, file.body_size, lambda body=body: (body,)))  # type: ignore[misc]
        return Image(tuple(files))

    def close(self) -> None:
        """The kernel takes the memory back when the last view of it is gone."""
        del self._array, self._memory


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
