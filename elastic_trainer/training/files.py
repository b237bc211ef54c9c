"""Small text files of a run, written so that a reader never sees half of one.

*Runs in* rank 0, main thread. *Owns* the files it is given. *Fails by* raising StorageError.
*Invariant*: after a crash a file holds its old or its new content.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.checkpoint.storage.posix_io import beside
from elastic_trainer.errors import StorageError


def finite(value: float | None) -> float | None:
    """``value``, or None if JSON cannot express it (NaN, infinity)."""
    return value if value is not None and math.isfinite(value) else None


@contextmanager
def storage_errors(path: Path, hint: str = "give a writable checkpoint.directory") -> Iterator[None]:
    """Translate the operating system's refusal to write ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}", hint=hint) from error


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by a file that holds ``text``, durably."""
    with storage_errors(path):
        temporary = beside(path)
        try:
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def make_writable(directory: Path) -> None:
    """Create ``directory`` where it is missing and prove that it can be written, before hours of work depend on it."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
