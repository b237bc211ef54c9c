"""Remove a run's keys from the store: of a run that is over, or that nobody will continue; and a machine's faults.

*Runs in* commands, the main thread.
*Owns* nothing.
*Fails by* ConfigError for a run that must not be forgotten, the store's errors.
*Invariant*: one write removes all keys, and only while no node is in the run and its round is the one that was judged.
Documents are read leniently, since runs of other versions must be removable too; checkpoints are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import DocumentError, MachineFault, RoundState, uncompressed
from elastic_trainer.store.api import (
    Compare,
    Delete,
    Field,
    Read,
    Relation,
    RunKeys,
    Store,
    machine_faults,
    prefix_end,
    unchanged,
)
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

_NAMED = 5


class _Summary(BaseModel):
    """The fields read from documents of any version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: str = ""
    wall: float = 0.0


@dataclass(frozen=True, slots=True)
class Remains:
    """What the store holds of one run at ``revision``. ``nodes``: the nodes that are in it; other keys do not count."""

    keys: RunKeys
    revision: int
    count: int
    nodes: tuple[str, ...]
    round_revision: int
    closed: bool
    last_wall: float
    """When its journal was last written (Unix time of the writing node); 0 if unknown."""


def look(store: Store, keys: RunKeys, deadline: Deadline) -> Remains:
    """Read what the store holds of the run, all at one revision."""
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
        current is not None and _summary(current.value).state == RoundState.CLOSED,
        max((_summary(item.value).wall for item in found[2].items), default=0.0),
    )


def _summary(value: bytes) -> _Summary:
    try:
        return _Summary.model_validate_json(uncompressed(value))
    except ValidationError:
        return _Summary()


def refusal(remains: Remains, *, unfinished: bool) -> ConfigError | None:
    """Why the run must be kept; None if it may be removed. Pure."""
    run = remains.keys.run_id
    if remains.nodes:
        more = " and others" if len(remains.nodes) > _NAMED else ""
        who = ", ".join(remains.nodes[:_NAMED]) + more
        return ConfigError(
            f"run {run!r} has nodes: {who}",
            hint="stop them first; a node that died disappears when its lease ends, by default after 5 s",
        )
    if not remains.closed and not unfinished:
        return ConfigError(
            f"run {run!r} is not over: its nodes may come back and continue it",
            hint="if they will not, or if they should start again at round 1 from their checkpoints, add --unfinished",
        )
    return None


def is_old(remains: Remains, now_wall: float, days: float) -> bool:
    """Whether the run has been over for ``days`` days, by the clock of the node that ended it. Pure."""
    return remains.closed and 0.0 < remains.last_wall <= now_wall - 86400.0 * days and not remains.nodes


def forget(store: Store, remains: Remains, deadline: Deadline) -> None:
    """Remove all keys of the run; raises ConfigError if the run has changed since ``look``."""
    keys = remains.keys
    # Holds if nodes/ has no key that was created after the look; also if it has no key at all.
    nobody = Compare(
        keys.nodes, Field.MOD_REVISION, Relation.LESS, remains.revision + 1, range_end=prefix_end(keys.nodes)
    )
    guards = [nobody, unchanged(keys.round, remains.round_revision)]
    everything = Delete(keys.root, range_end=prefix_end(keys.root))
    if not store.transact(guards, [everything], deadline=deadline).succeeded:
        raise ConfigError(f"run {keys.run_id!r} continues: a node has just joined it", hint="look at its status")


# ---- machines, whose faults outlive runs


def faults_of(store: Store, prefix: str, machine: str, deadline: Deadline) -> list[MachineFault]:
    """The known faults of ``machine``, in any run, oldest first. Raises ElasticTrainerError."""
    found = []
    for item in store.range(machine_faults(prefix, machine), deadline).items:
        try:
            found.append(MachineFault.decode(item.value, item.key))
        except DocumentError as error:
            logger().warning("document.refused", key=plain(item.key), error=str(error))
    return sorted(found, key=lambda each: each.wall)


def forget_machine(store: Store, prefix: str, machine: str, deadline: Deadline) -> int:
    """Forget the faults of a machine that was repaired; how many there were."""
    key = machine_faults(prefix, machine)
    known = len(store.range(key, deadline, keys_only=True).items)
    store.transact([], [Delete(key, range_end=prefix_end(key))], deadline=deadline)
    return known
