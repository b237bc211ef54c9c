"""Removes the leftovers of dead writers and removers, and nothing else.

*Runs in* the saving process, at its start. *Fails by* nothing: entries that cannot be judged or removed stay.
*Invariant*: the temporary directory of a live writer is never touched. On the writer's own machine the kernel says
whether it lives; elsewhere only a day without any write counts as death.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_trainer.checkpoint.events import Event, Transition
from elastic_trainer.checkpoint.layout import Kind, WriterIdentity, kind_of, parse_temporary, temporary_name
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.writers import alive, this_process
from elastic_trainer.errors import StorageError

ELSEWHERE_S = 86_400.0
"""Idle time after which a writer on another machine, or in another container, counts as dead."""
REBOOTED_S = 600.0
"""The same for a writer on a host of this name before its last boot; not at once, since host names may repeat."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Whether a temporary directory is removed, and why."""

    remove: bool
    reason: str


def fate(writer: WriterIdentity, me: WriterIdentity, alive: bool | None, idle_s: float | None) -> Fate:
    """Judge a temporary of ``writer`` from where ``me`` stands.

    ``alive`` is what the kernel says of the writer if it can be asked, ``idle_s`` the time without writes if known.
    """
    if writer == me:
        return Fate(False, "it is being written by this process")
    if alive is not None:
        return Fate(not alive, "its writer lives" if alive else f"its writer, process {writer.pid}, is dead")
    if idle_s is None:
        return Fate(False, "its age is unknown")
    limit = REBOOTED_S if writer.host == me.host and writer.boot != me.boot else ELSEWHERE_S
    verb = "was not written to for" if idle_s > limit else "was written to within"
    return Fate(idle_s > limit, f"its writer is on {writer.host}, and it {verb} {limit:.0f} s")


def sweep(storage: Storage) -> Iterator[Event]:
    """Remove leftovers; yields one event for each removed or unremovable entry."""
    try:
        names = storage.names()
    except OSError:
        return
    for name in names:
        if kind_of(name) is Kind.TRASH:
            yield _remove(storage, name, "its removal was interrupted")
        writer = parse_temporary(name)
        if writer is not None:
            verdict = _judge(storage, name, writer)
            if verdict.remove:
                yield _remove(storage, name, verdict.reason)


def _judge(storage: Storage, name: str, writer: WriterIdentity) -> Fate:
    me = this_process()
    living = alive(writer, me)
    idle_s = _idle_s(storage, name, me) if living is None and writer != me else None
    return fate(writer, me, living, idle_s)


def at_work(storage: Storage, name: str, limit_s: float) -> bool:
    """Whether the writer of the temporary ``name`` lives; on another machine, whether it has written in ``limit_s``."""
    writer, me = parse_temporary(name), this_process()
    living = None if writer is None else alive(writer, me)
    if living is not None:
        return living
    idle_s = _idle_s(storage, name, me)
    return idle_s is not None and idle_s <= limit_s


def may_live(name: str) -> bool:
    """Whether the writer of the temporary ``name`` is not known to be dead."""
    writer = parse_temporary(name)
    return writer is not None and alive(writer, this_process()) is not False


def _idle_s(storage: Storage, name: str, me: WriterIdentity) -> float | None:
    reference = temporary_name(me)
    try:
        storage.create(reference)
    except StorageError:
        return None
    try:
        return storage.idle_s(name, reference)
    except OSError:
        return None
    finally:
        _remove(storage, reference, "")


def _remove(storage: Storage, name: str, reason: str) -> Event:
    try:
        storage.remove(name)
    except OSError as error:
        return Event(Transition.REMOVAL_FAILED, name, f"{reason}, but it cannot be removed: {error.strerror or error}")
    return Event(Transition.SWEPT, name, reason)
