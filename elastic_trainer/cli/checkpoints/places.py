"""From words of a command line to checkpoints: ``DIR`` is a directory, ``DIR/NAME`` one checkpoint of it.

NAME may be cut short, and be ``newest`` or ``best``. *Fails by* ConfigError naming what is not there.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.checkpoint.inventory import Entry, Problem, committed, entry, examine, listed
from elastic_trainer.checkpoint.storage import ByteSource, Storage, open_storage
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import ConfigError

NEWEST, BEST = "newest", "best"
CHECKPOINT = "a directory of checkpoints (its newest), or DIR/NAME; NAME may be cut short, and be newest or best"
_NAME = re.compile(rf"step-[0-9a-z-]*|{NEWEST}|{BEST}")


def directory(location: str) -> Storage:
    """The storage of a directory that is there."""
    storage = open_storage(location)
    if not listed(storage) and "://" not in location and not Path(location).is_dir():
        raise ConfigError(f"there is no directory {location!r}", hint="give the checkpoint.directory of a job")
    return storage


def checkpoint(location: str) -> tuple[Storage, Entry]:
    """The checkpoint that ``location`` names; its manifest is good."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if not _NAME.fullmatch(name):
        return _newest(directory(location))
    storage = directory(parent or ("." if "/" not in location else "/"))
    if name == NEWEST:
        return _newest(storage)
    if name == BEST:
        return _best(storage)
    found = [text for text in map(str, committed(listed(storage))) if text.startswith(name)]
    if len(found) != 1:
        what = "no checkpoint" if not found else f"{len(found)} checkpoints"
        hint = f"see {suggestion('list', storage.location)}" if not found else f"give more of {found[0]}"
        raise ConfigError(f"{what} of {storage.location} begin{'s' * (not found)} with {name}", hint=hint)
    return storage, entry(storage, found[0])


def _newest(storage: Storage) -> tuple[Storage, Entry]:
    for each in examine(storage, listed(storage), {}):
        if isinstance(each, Problem):
            raise each.error
        return storage, each
    raise ConfigError(f"there are no checkpoints in {storage.location}", hint="give the checkpoint.directory of a job")


def _best(storage: Storage) -> tuple[Storage, Entry]:
    """The newest that was saved as best."""
    for each in examine(storage, listed(storage), {}):
        if isinstance(each, Entry) and each.best:
            return storage, each
    raise ConfigError(
        f"no checkpoint in {storage.location} was saved as best", hint=f"see {suggestion('list', storage.location)}"
    )


def suggestion(action: str, *words: str) -> str:
    """A command line that can be copied."""
    return shlex.join([PROGRAM, "checkpoints", action, *words])


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that all actions have."""
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of text")


# ---- progress


class Watched:
    """A storage that says how many bytes are read of it."""

    def __init__(self, inner: Storage, heard: Callable[[int], None]) -> None:
        self._inner, self._heard = inner, heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def source(self, name: str, file: str) -> ByteSource:
        return _WatchedSource(self._inner.source(name, file), self._heard)


class _WatchedSource:
    def __init__(self, inner: ByteSource, heard: Callable[[int], None]) -> None:
        self._inner, self._heard, self.size, self.readers = inner, heard, inner.size, inner.readers

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        complete = self._inner.read_into(buffer, offset)
        self._heard(len(buffer))
        return complete

    def close(self) -> None:
        self._inner.close()


@contextmanager
def progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error for ``size`` bytes; what is yielded counts them."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)
