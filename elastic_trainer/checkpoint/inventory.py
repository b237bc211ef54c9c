"""What a directory holds: committed checkpoints newest first, and what is wrong with the others.

*Runs in* any process. *Owns* nothing; changes nothing. *Fails by* CheckpointError if the directory cannot be listed.
Entries that vanish while they are looked at (retention elsewhere) are not mentioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.layout import CheckpointName, Kind, kind_of, parse_checkpoint, quarantined
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.reading import read_manifest
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint whose manifest is good; its other files have not been looked at."""

    name: str
    path: Path
    manifest: Manifest

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
            hint="check its owner and mode",
        ) from error


def committed(names: tuple[str, ...]) -> tuple[CheckpointName, ...]:
    """The committed checkpoints among ``names``, newest (highest round, then step) first."""
    return tuple(sorted((name for text in names if (name := parse_checkpoint(text)) is not None), reverse=True))


def quarantined_in(names: tuple[str, ...]) -> tuple[str, ...]:
    """The quarantined checkpoints among ``names``, newest first."""
    found = [(parse_checkpoint(quarantined(text) or ""), text) for text in names if kind_of(text) is Kind.QUARANTINED]
    return tuple(text for _, text in sorted(found, reverse=True))


def examine(storage: Storage, names: tuple[str, ...], known: Mapping[str, Entry]) -> Iterator[Entry | Problem]:
    """Look at the committed checkpoints among ``names``, newest first; ``known`` ones are taken as they are."""
    for name in map(str, committed(names)):
        try:
            yield known[name] if name in known else entry(storage, name)
        except GoneError:
            continue
        except (DamagedError, UnreadableError) as error:
            yield Problem(name, error)


def entry(storage: Storage, name: str) -> Entry:
    """The committed checkpoint ``name``, its manifest read and verified now."""
    return Entry(name, Path(storage.location) / name, read_manifest(storage, name))
