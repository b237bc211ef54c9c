"""Lists a directory: committed checkpoints, newest first, and the problems of the others. Changes nothing.

*Runs in* any process. *Fails by* CheckpointError if the directory cannot be listed.
Entries that disappear meanwhile (by another process's retention) are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.layout import CheckpointName, Kind, kind_of, parse_checkpoint, quarantined
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.reading import read_manifest, verify
from elastic_trainer.checkpoint.storage import Storage, open_storage
from elastic_trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint whose manifest is good; its other files have not been looked at."""

    name: str
    place: str
    """Its path or URL."""
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Its path, for a checkpoint in a file system."""
        return Path(self.place)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def round(self) -> int:
        return self.manifest.round

    @property
    def best(self) -> bool:
        return self.manifest.best


@dataclass(frozen=True, slots=True)
class Problem:
    """A committed checkpoint that cannot be used, and why."""

    name: str
    error: DamagedError | UnreadableError


def listed(storage: Storage) -> tuple[str, ...]:
    """All names in the directory; none if it does not exist."""
    try:
        return storage.names()
    except NotADirectoryError as error:
        raise CheckpointError(
            f"{storage.location} is not a directory", hint="give a directory of checkpoints"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint directory {storage.location} cannot be read: {error.strerror or error}",
            hint=getattr(error, "hint", "check its owner and mode"),
        ) from error


def committed(names: tuple[str, ...]) -> tuple[CheckpointName, ...]:
    """The committed checkpoints among ``names``, newest (highest round, then step) first."""
    return tuple(sorted((name for text in names if (name := parse_checkpoint(text)) is not None), reverse=True))


def quarantined_in(names: tuple[str, ...]) -> tuple[str, ...]:
    """The quarantined checkpoints among ``names``, newest first."""
    found = [(parse_checkpoint(quarantined(text) or ""), text) for text in names if kind_of(text) is Kind.QUARANTINED]
    return tuple(text for _, text in sorted(found, reverse=True))


def examine(storage: Storage, names: tuple[str, ...], known: Mapping[str, Entry]) -> Iterator[Entry | Problem]:
    """Examine the committed checkpoints among ``names``, newest first; ``known`` ones are not read again."""
    for name in map(str, committed(names)):
        try:
            yield known[name] if name in known else entry(storage, name)
        except GoneError:
            continue
        except (DamagedError, UnreadableError) as error:
            yield Problem(name, error)


def entry(storage: Storage, name: str) -> Entry:
    """The committed checkpoint ``name``, its manifest read and verified now."""
    return Entry(name, f"{storage.location}/{name}", read_manifest(storage, name))


class Soundness(StrEnum):
    """The verification status of an entry."""

    VERIFIED = "verified"
    """Every byte was read and compared just now."""
    UNVERIFIED = "unverified"
    """The manifest is good; the rest was not read."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Description:
    """One entry. ``manifest`` is None if unreadable; ``problem`` is empty if there is none."""

    name: str
    path: str
    status: Soundness
    manifest: Manifest | None = None
    problem: str = ""


def describe(directory: str | Path, *, read_all: bool = True) -> list[Description]:
    """The entries of ``directory``, a path or URL: committed ones newest first, then quarantined ones.

    With ``read_all`` every byte is verified, else manifests only.
    """
    storage = open_storage(directory)
    names = listed(storage)
    described = (_described(storage, each, read_all) for each in examine(storage, names, {}))
    found = [each for each in described if each is not None]
    return found + [
        Description(name, f"{storage.location}/{name}", Soundness.QUARANTINED) for name in quarantined_in(names)
    ]


def _described(storage: Storage, each: Entry | Problem, read_all: bool) -> Description | None:
    """None for an entry that vanished meanwhile."""
    path = f"{storage.location}/{each.name}"
    if isinstance(each, Problem):
        return Description(each.name, path, _status(each.error), problem=str(each.error))
    if not read_all:
        return Description(each.name, path, Soundness.UNVERIFIED, each.manifest)
    try:
        verify(storage, each.manifest)
    except GoneError:
        return None
    except (DamagedError, UnreadableError) as error:
        return Description(each.name, path, _status(error), each.manifest, str(error))
    return Description(each.name, path, Soundness.VERIFIED, each.manifest)


def _status(error: DamagedError | UnreadableError) -> Soundness:
    return Soundness.DAMAGED if isinstance(error, DamagedError) else Soundness.UNREADABLE
