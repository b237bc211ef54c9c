"""Which nodes are present, read from the store for a node that gives up and does not watch the nodes.

*Runs in* any thread of the agent. *Owns* nothing. *Fails by* nothing: the result says what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.membership.leader_priority import STRAYS, written_by_nodes
from elastic_trainer.store.api import Read, Store, prefix_end
from elastic_trainer.store.keys import RunKeys

NAMED = 32
"""Upper bound on the nodes that a message names."""
CALLED = 64
"""Members that are looked up; if none of them is present, the round counts as having no live member."""


@dataclass(frozen=True, slots=True)
class RollCall:
    """The present nodes, for people, and whether members of the round are among them."""

    present: str
    round_lives: bool


def roll_call(store: Store, keys: RunKeys, current: RoundDocument | None, deadline: Deadline) -> RollCall:
    """Read the nodes of the run from the store."""
    everyone = Read(keys.nodes, prefix_end(keys.nodes), limit=NAMED + 1 + STRAYS, keys_only=True)
    members = current.members[:CALLED] if current is not None else ()
    reads = [Read(keys.node(member.node), keys_only=True) for member in members]
    try:
        found = store.transact([], [everyone, *reads], deadline=deadline)
    except ElasticTrainerError as error:
        return RollCall(f"not known: {error}", round_lives=False)
    names = [name for name, _ in written_by_nodes(found.reads[0].items, keys)]
    there = [read.first for read in found.reads[1:]]
    lives = any(
        key is not None and key.create_revision == member.create_revision
        for key, member in zip(there, members, strict=True)
    )
    return RollCall(named(names), lives)


def named(names: list[str]) -> str:
    """The first of ``names``, in words."""
    if not names:
        return "none"
    return ", ".join(names[:NAMED]) + (" and others" if len(names) > NAMED else "")
