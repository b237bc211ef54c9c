"""A disk that is soon full."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.requirements import needs, needs_root


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def mounted(path: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size at ``path``, for the body; skips the test where that needs more rights than there are."""
    needs_root("mounting a small tmpfs")
    for tool in ("mount", "umount"):
        needs(tool, "mounting a small tmpfs")
    path.mkdir()
    try:
        run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "elastic-test", str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this root may not mount: {error.stderr.decode().strip()}")
    try:
        yield path
    finally:
        run("umount", "-l", str(path))


def fill(disk: Path, but_bytes: int = 0) -> Path:
    """Leave no more than ``but_bytes`` free; returns the file that takes the space, to be removed."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        if but_bytes:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - but_bytes)
            return ballast
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return ballast
