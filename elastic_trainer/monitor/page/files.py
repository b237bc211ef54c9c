"""The files that the pages load: style sheet, modules, icons. Pages load nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Final

TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def static(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of ``name`` (``page.css``); None if there is no such file.

    Serves only names found in the package, so no name can escape it.
    """
    place = _every().get(name)
    return None if place is None else (place.read_bytes(), TYPES[PurePosixPath(name).suffix])


@cache
def _every() -> dict[str, Traversable]:
    found = files(__package__).joinpath("static").iterdir()
    return {each.name: each for each in found if PurePosixPath(each.name).suffix in TYPES}
