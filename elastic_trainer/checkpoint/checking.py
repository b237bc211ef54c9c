"""One pass over the bytes before a save: computes checksums, and checks that the numbers are finite.

It works piece by piece, so that the check finds the bytes in the core's cache. numpy is imported by the function.

*Runs in* the sealing and the committing thread, concurrently with training: no loop over tensors holds the interpreter
lock. *Owns* nothing.
*Fails by* NonFiniteError, which names the first watched parameter with a NaN or an infinity.
*Invariant*: a file gets checksums only from all of its own bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import xxhash

from elastic_trainer.checkpoint.image import PIECE, FileImage, Image, WatchedTensor, pieces
from elastic_trainer.checkpoint.manifest import FileRecord, checksum
from elastic_trainer.errors import NonFiniteError

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
