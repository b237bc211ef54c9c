"""Take a run's keys out of the store: of one that is over, or that nobody will go on with.

*Runs in* commands, the main thread.
*Owns* nothing.
*Fails by* ConfigError for a run that must not be forgotten, the store's errors.
*Invariant*: the keys go in one write, and only while no node is in the run and its round is as it was judged. What is
read is taken as it comes, since other versions' runs must go as well; checkpoints are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.store.api import Compare, Delete, Field, Read, Relation, Store, prefix_end, unchanged
from elastic_trainer.store.keys import RunKeys

_NAMED = 5


class _Told(BaseModel):
    """What is read of documents of any version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: str = ""
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class Remains:
    """What the store holds of one run at ``revision``. ``nodes``: those that are in it; keys of none do not count."""

    keys: RunKeys
    revision: int
    count: int
    nodes: tuple[str, ...]
    round_revision: int
    closed: bool
    last_wall: float
    """When its journal was last written (Unix time of the node that wrote); 0 where that is not known."""


def look(store: Store, keys: RunKeys, deadline: Deadline) -> Remains:
    """What there is of the run. The round is read with the rest, at one revision."""
    everything = Read(keys.root, prefix_end(keys.root), keys_only=True)
    events = Read(keys.events, prefix_end(keys.events))
    read = store.transact([], [everything, Read(keys.round), events], deadline=deadline)
    found = read.reads
    nodes = [name for item in found[0].items if (name := keys.node_id(item.key)) is not None]
    current = found[1].first
    return Remains(
        keys,
        read.revision,
        len(found[0].items),
        tuple(nodes),
        current.mod_revision if current is not None else 0,
        current is not None and _told(current.value).state == RoundState.CLOSED,
        max((_told(item.value).wall for item in found[2].items), default=0.0),
    )


def _told(value: bytes) -> _Told:
    try:
        return _Told.model_validate_json(value)
    except ValidationError:
        return _Told()


def refusal(remains: Remains, *, unfinished: bool) -> ConfigError | None:
    """Why the run must be kept; None if it may go. Pure."""
    run = remains.keys.run_id
    if remains.nodes:
        more = " and others" if len(remains.nodes) > _NAMED else ""
        who = ", ".join(remains.nodes[:_NAMED]) + more
        return ConfigError(
            f"run {run!r} has nodes: {who}",
            hint="stop them first; a node that died is gone when its lease ends, by default after 5 s",
        )
    if not remains.closed and not unfinished:
        return ConfigError(
            f"run {run!r} is not over: its nodes may come back and go on",
            hint="if they will not, or are to begin with round 1 from their checkpoints, add --unfinished",
        )
    return None


def is_old(remains: Remains, now_wall: float, days: float) -> bool:
    """Whether the run has been over for ``days`` days, by the clock of the node that ended it. Pure."""
    return remains.closed and 0.0 < remains.last_wall <= now_wall - 86400.0 * days and not remains.nodes


def forget(store: Store, remains: Remains, deadline: Deadline) -> None:
    """Remove all keys of the run, unless anything has happened to it since it was looked at."""
    keys = remains.keys
    # Whatever is below nodes/ now was there when it was looked at; where nothing is, the comparison holds.
    nobody = Compare(
        keys.nodes, Field.MOD_REVISION, Relation.LESS, remains.revision + 1, range_end=prefix_end(keys.nodes)
    )
    guards = [nobody, unchanged(keys.round, remains.round_revision)]
    everything = Delete(keys.root, range_end=prefix_end(keys.root))
    if not store.transact(guards, [everything], deadline=deadline).succeeded:
        raise ConfigError(f"run {keys.run_id!r} goes on: somebody has just joined it", hint="look at its status")
