"""Flip single bits of a checkpoint's files at random, or cut them off, and see who notices."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.checkpoint import CheckpointManager, DamagedError, Entry


def random_bits(path: Path, count: int, draw: random.Random) -> Iterator[tuple[Path, int]]:
    """``count`` places in the files of the directory ``path`` (or in that file), each file hit alike often."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for index in range(count):
        file = files[index % len(files)]
        yield file, draw.randrange(8 * file.stat().st_size)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of ``path`` is wrong inside the block."""
    _flip(path, bit)
    try:
        yield
    finally:
        _flip(path, bit)


@contextmanager
def cut(path: Path, size: int) -> Iterator[None]:
    """``path`` ends after ``size`` bytes inside the block."""
    content = path.read_bytes()
    os.truncate(path, size)
    try:
        yield
    finally:
        path.write_bytes(content)


def _flip(path: Path, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, bit // 8)[0]
        os.pwrite(descriptor, bytes([byte ^ 1 << bit % 8]), bit // 8)
    finally:
        os.close(descriptor)


def unnoticed(checkpoints: CheckpointManager, entry: Entry, count: int, seed: int) -> list[str]:
    """Flips in ``entry``'s files that loading did not report, of ``count``."""
    missed = []
    for file, bit in random_bits(entry.path, count, random.Random(seed)):
        with flipped(file, bit):
            try:
                checkpoints.load(entry)
                missed.append(f"{file.name} bit {bit}")
            except DamagedError:
                continue
    return missed
