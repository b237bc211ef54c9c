"""A directory of checkpoints as a person wants to see it: each entry with its status. Changes nothing.

*Runs in* the command line. *Owns* nothing. *Fails by* CheckpointError if the directory cannot be listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.inventory import Entry, Problem, examine, listed, quarantined_in
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.reading import verify
from elastic_trainer.checkpoint.storage import PosixStorage, Storage


class Soundness(StrEnum):
    """What is known about an entry."""

    VERIFIED = "verified"
    """Every byte was read and compared just now."""
    UNVERIFIED = "unverified"
    """The manifest is good; the rest was not read."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Description:
    """One entry. ``manifest`` is None where it cannot be read; ``problem`` is empty where there is none."""

    name: str
    path: Path
    status: Soundness
    manifest: Manifest | None = None
    problem: str = ""


def describe(directory: str | Path, *, read_all: bool = True) -> list[Description]:
    """The entries of ``directory``: committed ones newest first, then quarantined ones.

    With ``read_all`` every byte is verified, else manifests only.
    """
    storage = PosixStorage(Path(directory))
    names = listed(storage)
    described = (_described(storage, each, read_all) for each in examine(storage, names, {}))
    found = [each for each in described if each is not None]
    return found + [Description(name, Path(directory) / name, Soundness.QUARANTINED) for name in quarantined_in(names)]


def _described(storage: Storage, each: Entry | Problem, read_all: bool) -> Description | None:
    """None for an entry that vanished meanwhile."""
    path = Path(storage.location) / each.name
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
