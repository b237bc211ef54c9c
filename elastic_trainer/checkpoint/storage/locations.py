"""From a path or URL to the storage there."""

from __future__ import annotations

import re
from pathlib import Path

from elastic_trainer.checkpoint.storage.port import Storage
from elastic_trainer.checkpoint.storage.posix import PosixStorage
from elastic_trainer.errors import ConfigError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)


def is_url(location: str | Path) -> bool:
    """Whether ``location`` is a URL, as opposed to a path."""
    return isinstance(location, str) and _URL.fullmatch(location) is not None


def open_storage(location: str | Path) -> Storage:
    """The storage at ``location``, a path or URL, not looked at yet; ConfigError for a URL of no known kind."""
    if not is_url(location):
        return PosixStorage(Path(location))
    raise ConfigError(f"checkpoints cannot be kept at {location}", hint="give a directory")
