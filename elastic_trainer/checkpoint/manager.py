"""Saves, finds and loads the checkpoints of one directory.

*Runs in* the worker of rank 0 (saving), in any process (finding, loading). One thread at a time commits; another one
may find and load.
*Fails by* StorageError (cannot save: training may continue), CheckpointError (cannot load: do not start from scratch).
*Invariant*: a damaged checkpoint is renamed, never deleted; retention runs only after a commit and never removes what
was just committed.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint.commit import (
    Claim,
    Owner,
    check_writable,
    commit,
    idle_s,
    offered,
    require_space,
    write_share,
)
from elastic_trainer.checkpoint.manifest import (
    CheckpointName,
    DamagedError,
    GoneError,
    Image,
    Kind,
    Manifest,
    UnreadableError,
    WriterIdentity,
    alive,
    checked_fields,
    kind_of,
    parse_checkpoint,
    parse_temporary,
    quarantine_name,
    quarantined,
    this_process,
    trash_name,
)
from elastic_trainer.checkpoint.reading import (
    LOAD_NEW,
    CheckpointFiles,
    LoadInto,
    read_manifest,
    read_state,
    verify,
)
from elastic_trainer.checkpoint.retention import Candidate, Retention, Ruling, by_metric, decide
from elastic_trainer.checkpoint.storage import Storage, is_url, open_storage
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.telemetry.logs import logger

CLAIM_S = 5.0
"""Seconds that a killed process may take to die and release its lock."""
_MOST_QUARANTINES = 1000
"""How often one name can be quarantined (each time it must have been restored by hand)."""
ELSEWHERE_S = 86_400.0
"""Idle time after which a writer on another machine, or in another container, counts as dead."""
REBOOTED_S = 600.0
"""The same for a writer on a host of this name before its last boot; not at once, since host names may repeat."""


# ---- events


class Transition(StrEnum):
    """The transitions; the values are the names of the log lines."""

    COMMITTED = "checkpoint.committed"
    FAILED = "checkpoint.failed"
    LOADED = "checkpoint.loaded"
    QUARANTINED = "checkpoint.quarantined"
    SKIPPED = "checkpoint.skipped"
    OUTRANKED = "checkpoint.outranked"
    REMOVED = "checkpoint.removed"
    REMOVAL_FAILED = "checkpoint.removal_failed"
    SWEPT = "checkpoint.swept"


_WARNINGS = {Transition.QUARANTINED, Transition.SKIPPED, Transition.OUTRANKED, Transition.REMOVAL_FAILED}


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of the directory entry ``name``; ``values`` are the other keys of the log line."""

    kind: Transition
    name: str
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


EventSink = Callable[[Event], None]


def announce(event: Event, listener: EventSink | None) -> None:
    """Log ``event`` and pass it to ``listener``."""
    log = logger()
    write = log.error if event.kind is Transition.FAILED else log.warning if event.kind in _WARNINGS else log.info
    details = {"reason": event.reason, **event.values} if event.reason else dict(event.values)
    write(str(event.kind), checkpoint=event.name, **details)
    if listener is not None:
        listener(event)


# ---- what there is


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint whose manifest is good; its other files have not been looked at."""

    name: str
    location: str
    """Its path or URL."""
    manifest: Manifest

    @property
    def path(self) -> Path:
        """Its path, for a checkpoint in a file system."""
        return Path(self.location)

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
    found = []
    for each in examine(storage, names, {}):
        described = _described(storage, each)
        with suppress(GoneError):
            found.append(verified(storage, described) if read_all else described)
    return found + [
        Description(name, f"{storage.location}/{name}", Soundness.QUARANTINED) for name in quarantined_in(names)
    ]


def _described(storage: Storage, each: Entry | Problem) -> Description:
    path = f"{storage.location}/{each.name}"
    if isinstance(each, Problem):
        return Description(each.name, path, _status(each.error), problem=str(each.error))
    return Description(each.name, path, Soundness.UNVERIFIED, each.manifest)


def verified(files: CheckpointFiles, each: Description) -> Description:
    """``each`` after every byte of it was read; GoneError if it vanished meanwhile."""
    if each.manifest is None or each.status is not Soundness.UNVERIFIED:
        return each
    try:
        verify(files, each.manifest)
    except (DamagedError, UnreadableError) as error:
        return replace(each, status=_status(error), problem=str(error))
    return replace(each, status=Soundness.VERIFIED)


def _status(error: DamagedError | UnreadableError) -> Soundness:
    return Soundness.DAMAGED if isinstance(error, DamagedError) else Soundness.UNREADABLE


# ---- what dead writers and interrupted removals left


def reason_to_remove(
    writer: WriterIdentity, me: WriterIdentity, alive: bool | None, idle_s: float | None
) -> str | None:
    """Why ``me`` may remove a temporary directory of ``writer``; None if it must stay.

    ``alive`` is what the kernel says of the writer if it can be asked, ``idle_s`` the time without writes if known.
    """
    if writer == me or alive:
        return None
    if alive is False:
        return f"its writer, process {writer.pid}, is dead"
    limit = REBOOTED_S if writer.host == me.host and writer.boot != me.boot else ELSEWHERE_S
    if idle_s is None or idle_s <= limit:
        return None
    return f"its writer is on {writer.host}, and it was not written to for {limit:.0f} s"


def sweep(storage: Storage) -> Iterator[Event]:
    """Remove leftovers; yields one event for each removed or unremovable entry."""
    try:
        names = storage.names()
    except OSError:
        return
    me = this_process()
    for name in names:
        if kind_of(name) is Kind.TRASH:
            yield _remove(storage, name, "its removal was interrupted")
        writer = parse_temporary(name)
        if writer is not None:
            living = alive(writer, me)
            quiet_s = idle_s(storage, name) if living is None and writer != me else None
            reason = reason_to_remove(writer, me, living, quiet_s)
            if reason is not None:
                yield _remove(storage, name, reason)


def _remove(storage: Storage, name: str, reason: str) -> Event:
    try:
        storage.remove(name)
    except OSError as error:
        return Event(Transition.REMOVAL_FAILED, name, f"{reason}, but it cannot be removed: {error.strerror or error}")
    return Event(Transition.SWEPT, name, reason)


# ---- saving, finding, loading


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """The metadata of a state."""

    step: int
    round: int = 0
    epoch: int = 0
    samples: int = 0
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable checkpoint. ``duration_s`` runs from the call of save to durability."""

    entry: Entry
    size: int
    duration_s: float
    free_bytes: int | None = None
    """Free space left for checkpoints after the save, if known."""

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state, every byte of it verified; tensors are on the CPU."""

    state: dict[str, Any]
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name


class CheckpointManager:
    """The checkpoints in ``directory``, a path or URL; ``on_event`` gets each transition, which is also logged.

    With an ``owner`` no other job can save there meanwhile, from :meth:`check_writable` or the first save on.
    """

    def __init__(
        self,
        directory: str | Path,
        retention: Retention | None = None,
        on_event: EventSink | None = None,
        *,
        owner: Owner | None = None,
        storage: Storage | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._storage = storage if storage is not None else open_storage(directory)
        self._retention = retention if retention is not None else Retention()
        self.owner = owner if owner is not None else Owner()
        self._claim = Claim(self._storage, owner, clock) if owner is not None else None
        self._on_event = on_event
        self._clock = clock
        self._known: dict[str, Entry] = {}
        self._reported: set[str] = set()

    @property
    def location(self) -> str:
        """The location of the checkpoints, valid for other processes too."""
        location = self._storage.location
        return location if is_url(location) else os.path.abspath(location)

    @property
    def files(self) -> CheckpointFiles:
        """For callers that read a checkpoint in parts, and report the result by :meth:`loaded` or :meth:`reject`."""
        return self._storage

    # -- saving

    def check_writable(self) -> None:
        """Raise StorageError unless a checkpoint could be saved here; creates the directory if it is missing."""
        self.sweep()  # what dead writers left may fill the disk
        check_writable(self._storage)
        if self._claim is not None:
            self._claim.take(CLAIM_S)

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def sweep(self) -> int:
        """Remove leftovers of dead writers; returns the number of removed entries."""
        return sum(self._announce(event).kind is Transition.SWEPT for event in sweep(self._storage))

    def save(self, state: Mapping[str, Any], info: SaveInfo) -> Committed:
        """Commit ``state`` durably, then apply retention. Raises as :meth:`encode` and :meth:`commit` do."""
        return self.commit(self.encode(state, info), self.draft(info))

    def encode(self, state: Mapping[str, Any], info: SaveInfo, **how: Any) -> Image:
        """The files of ``state`` as of :func:`codec.encode`. CheckpointError names what cannot be saved."""
        try:
            return codec.encode(state, **how)
        except CheckpointError as error:
            self._failed(self.draft(info), error)
            raise

    def commit(self, image: Image, draft: Manifest, stop: threading.Event | None = None) -> Committed:
        """Write ``image`` durably under the name of ``draft``, then apply retention.

        StorageError if it cannot be written: nothing is lost, earlier checkpoints are intact. ``stop``: see
        :func:`commit.commit`.
        """
        result = self.write(image, draft, stop)
        self._retain(result.name)
        return result

    def offered(self, draft: Manifest) -> bool:
        """Whether another process, which seems to live, rescues the state of ``draft``."""
        return offered(self._storage, draft)

    def write(self, image: Image, draft: Manifest, stop: threading.Event | None = None) -> Committed:
        """:meth:`commit` without retention: for a process that does not know the policy."""
        began = self._clock.monotonic()
        try:
            self._storage.prepare()
            try:
                require_space(self._storage, image.size)  # before the claim, which writes a file too
            except StorageError:
                self.sweep()  # leftovers of dead writers may hold the space that is missing
            if self._claim is not None:
                self._claim.take()
            complete = commit(self._storage, image, draft, stop, self._clock)
        except CheckpointError as error:
            self._failed(draft, error)
            raise
        saved = Entry(complete.name, f"{self._storage.location}/{complete.name}", complete)
        duration_s, free_bytes = self._clock.monotonic() - began, None
        with suppress(StorageError):
            free_bytes = self._storage.free_bytes()
        result = Committed(saved, complete.size, duration_s, free_bytes)
        self._known[saved.name] = saved
        values = {"step": draft.step, "round": draft.round, "bytes": result.size, "duration_s": result.duration_s}
        self._announce(Event(Transition.COMMITTED, saved.name, values=values))
        return result

    def write_share(
        self, image: Image, manifest: Manifest, turn: int, stop: threading.Event, *, refused: bool = False
    ) -> tuple[str, ...]:
        """Write files of ``image`` for a process that commits the same state, as :func:`commit.write_share` does."""
        return write_share(self._storage, image, manifest, turn, stop, self._clock, refused=refused)

    def _failed(self, draft: Manifest, error: CheckpointError) -> None:
        self._announce(Event(Transition.FAILED, draft.name, str(error), {"step": draft.step, "round": draft.round}))

    def draft(self, info: SaveInfo) -> Manifest:
        """The manifest of a checkpoint that is about to be saved; its files are filled in when they are written."""
        values = {each.name: getattr(info, each.name) for each in fields(info)} | {
            "metrics": {key: float(value) for key, value in info.metrics.items()},
            "fields": checked_fields(info.fields),
        }
        name = str(CheckpointName(round=info.round, step=info.step))
        created = self._clock.wall()
        return Manifest(name=name, run=self.owner.run, created=created, versions=_versions(), files=(), **values)

    def _retain(self, just_saved: str) -> None:
        try:
            entries = self.entries()
        except CheckpointError as error:  # the checkpoint is safe nevertheless
            self._announce(Event(Transition.REMOVAL_FAILED, just_saved, f"retention was not applied: {error}"))
            return
        if entries and entries[0].name != just_saved:
            reason = f"{entries[0].name} counts as newer (higher round or step) and would be resumed from"
            self._announce(Event(Transition.OUTRANKED, just_saved, reason))
        self._apply(entries, frozenset({just_saved}))

    def prune(self, *, dry_run: bool = False) -> tuple[Ruling, ...]:
        """Apply retention now, though nothing was saved. StorageError while another job saves here."""
        if self._claim is not None and not dry_run:
            self._claim.take()
        return self._apply(self.entries(), frozenset(), dry_run=dry_run)

    def _apply(
        self, entries: tuple[Entry, ...], protected: frozenset[str], *, dry_run: bool = False
    ) -> tuple[Ruling, ...]:
        verdicts = decide([_candidate(each) for each in entries], self._retention, protected)
        for verdict in verdicts:
            if not verdict.keep and not dry_run:
                self._remove(verdict.name, verdict.reason)
        return verdicts

    def _remove(self, name: str, reason: str) -> None:
        """Rename the checkpoint before its files are deleted: under its own name it is always complete or absent."""
        trash = trash_name(name)
        try:
            self._storage.rename(name, trash)
            self._storage.remove(trash)
        except FileNotFoundError:
            return  # another process was faster
        except OSError as error:
            text = f"{reason}, but it cannot be removed: {error.strerror or error}"
            self._announce(Event(Transition.REMOVAL_FAILED, name, text))
            return
        self._announce(Event(Transition.REMOVED, name, reason))

    # -- finding

    def entries(self) -> tuple[Entry, ...]:
        """All committed checkpoints with a good manifest, newest first; the others are reported and skipped."""
        found = []
        for each in examine(self._storage, listed(self._storage), self._known):
            if isinstance(each, Entry):
                found.append(each)
            else:
                self._skip(each)
        self._known = {each.name: each for each in found}
        return tuple(found)

    def newest(self, apart_from: Collection[str] = ()) -> Entry | None:
        """The newest checkpoint by its manifest alone, of those not ``apart_from``; None if there never was one.

        Raises CheckpointError if there are checkpoints, but none with a good manifest.
        """
        failed = [*apart_from]
        passed_over = {*apart_from}
        while True:
            names = listed(self._storage)
            untried = tuple(name for name in names if name not in passed_over)
            if not committed(untried):
                self._require_none_bad(failed, names)
                return None
            for each in examine(self._storage, untried, self._known):
                if isinstance(each, Entry):
                    return each
                self._skip(each)
                failed.append(each.name)
            passed_over.update(untried)  # bad or removed meanwhile; another one may have been committed

    def best(self) -> Entry | None:
        """The best checkpoint by the policy's metric, else the newest one saved as best, else None."""
        entries = {each.name: each for each in self.entries()}
        ranked = by_metric([_candidate(each) for each in entries.values()], self._retention)
        if ranked:
            return entries[ranked[0].name]
        return next((each for each in entries.values() if each.best), None)

    # -- loading

    def load(self, wanted: Entry, live: LoadInto = LOAD_NEW) -> Loaded:
        """The state of ``wanted``; DamagedError, GoneError or UnreadableError (all CheckpointErrors) otherwise.

        Tensors that are ``live`` are overwritten, and are part of what comes back. After an error they hold neither
        the one state nor the other: load another checkpoint, or end.
        """
        began = self._clock.monotonic()
        manifest = read_manifest(self._storage, wanted.name)
        state = read_state(self._storage, manifest, live)
        self.loaded(manifest, self._clock.monotonic() - began)
        return Loaded(state, manifest)

    def loaded(self, manifest: Manifest, duration_s: float, **values: Any) -> None:
        """Report that it was read in ``duration_s`` seconds."""
        known = {"step": manifest.step, "round": manifest.round, "bytes": manifest.size, "duration_s": duration_s}
        self._announce(Event(Transition.LOADED, manifest.name, values={**known, **values}))

    def reject(self, name: str, error: CheckpointError) -> None:
        """The checkpoint ``name`` cannot be loaded: quarantine it if it is damaged, report it if it cannot be read."""
        if isinstance(error, DamagedError):
            self._quarantine(name, error)
        elif isinstance(error, UnreadableError):
            self._skip(Problem(name, error))

    def _require_none_bad(self, failed: list[str], names: tuple[str, ...]) -> None:
        """Distinguish a directory that never had a checkpoint from one where all are bad (CheckpointError)."""
        bad = list(dict.fromkeys([*failed, *filter(None, map(quarantined, quarantined_in(names)))]))
        if bad:
            raise CheckpointError(
                f"no checkpoint in {self._storage.location} can be read; tried or quarantined: {', '.join(bad)}",
                hint="restore one from a copy, or move them all elsewhere to start from scratch",
            )

    def _quarantine(self, name: str, error: DamagedError) -> None:
        self._known.pop(name, None)
        for number in range(1, _MOST_QUARANTINES):
            new = quarantine_name(name, number)
            try:
                self._storage.rename(name, new)
            except FileNotFoundError:
                return  # gone, or quarantined by another process
            except OSError as problem:
                if self._storage.exists(new):
                    continue
                text = f"{error}; it cannot be renamed: {problem.strerror or problem}"
                self._announce(Event(Transition.SKIPPED, name, text))
                return
            self._announce(Event(Transition.QUARANTINED, name, str(error), {"renamed_to": new}))
            return

    def _skip(self, problem: Problem) -> None:
        """Report ``problem`` once for each checkpoint, not at every save."""
        if problem.name not in self._reported:
            self._reported.add(problem.name)
            self._announce(Event(Transition.SKIPPED, problem.name, str(problem.error)))

    def _announce(self, event: Event) -> Event:
        announce(event, self._on_event)
        return event


def _candidate(each: Entry) -> Candidate:
    return Candidate(each.name, each.step, each.best, each.manifest.metrics)


def _versions() -> dict[str, str]:
    """Of what is loaded: this package always is, torch where a state has tensors."""
    loaded = {name: sys.modules[name] for name in ("elastic_trainer", "torch") if name in sys.modules}
    return {"python": platform.python_version(), **{name: str(each.__version__) for name, each in loaded.items()}}
