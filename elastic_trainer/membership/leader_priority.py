"""Which nodes watch the node keys: the three most senior, and after a while others that have to replace them. Pure.

A watch on the nodes delivers every change of every node; if all nodes watched, N changes would cost N x N events. So
the most senior node, which decides, and its two deputies watch the nodes, and all others only the round document. The
next round document, which names the members with their create-revisions, shows that a decider is gone. If all three
are gone, nobody writes one; therefore all other nodes check from time to time which node is the most senior.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_trainer.membership.documents import Ghost, RoundDocument, RoundState
from elastic_trainer.store.api import KeyValue, Order, Read, prefix_end
from elastic_trainer.store.keys import RunKeys

SENIORS = 3
"""The decider and its deputies."""
STRAYS = 32
"""Foreign keys among the oldest that one request can skip."""
DEPUTY_PATIENCE_S = 1.0
"""Seconds after the end of a round at which the next most senior nodes start to watch the nodes too."""
CROWD = 16
"""Up to this many nodes all may watch, so nobody stops."""
LONGEST_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What a node that watches only the round does after ``after_s`` seconds without news.

    ``places``: ask the store for this many of the oldest nodes, and watch the nodes if this one is among them; None:
    watch them without asking.
    """

    after_s: float
    places: int | None


def plan(
    document: RoundDocument | None, node: str, create_revision: int, asked: int, asked_at_s: float, patience_s: float
) -> Plan:
    """What ``node`` does if ``document`` does not change.

    ``asked``: how often it has asked the store since the document or its own key last changed. ``asked_at_s``: seconds
    from that change to its last question. ``patience_s``: seconds until the leases of dead nodes have ended.
    """
    if document is not None and document.state is RoundState.CLOSED:
        return Plan(math.inf, None)
    line = elders(document, create_revision)
    member = document is not None and document.member(node) is not None
    if member and line < SENIORS and not asked:
        return Plan(0.0, SENIORS)
    if document is not None and document.state is RoundState.ACTIVE:
        # The more junior a node, the rarer it asks: a thousand nodes ask as often as a hundred, however many are dead.
        return Plan(asked_at_s + patience_s * max(1, (line // SENIORS).bit_length()), SENIORS)
    if member and line < 2 * SENIORS:
        return Plan(DEPUTY_PATIENCE_S, None)
    # Each further question asks for three more places, which passes over deciders that live but do nothing.
    return Plan(asked_at_s + patience_s * min(2**asked, LONGEST_PATIENCE), SENIORS * (1 + asked))


def elders(document: RoundDocument | None, create_revision: int) -> int:
    """The number of members of the round that are more senior."""
    members = document.members if document is not None else ()
    return sum(member.create_revision < create_revision for member in members)


def oldest_keys(keys: RunKeys, count: int) -> Read:
    """Reads the ``count`` oldest keys, oldest first, and a few more in case some are not nodes' keys."""
    end = prefix_end(keys.nodes)
    return Read(keys.nodes, end, limit=count + STRAYS, order=Order.CREATE_REVISION, keys_only=True)


def first_names(keys: Iterable[tuple[str, KeyValue]], ghosts: Iterable[Ghost], places: int) -> list[str]:
    """The nodes that hold the first ``places`` of ``keys``, oldest first, without ghosts (the values are not read)."""
    passed_over = {(ghost.node, ghost.create_revision, ghost.mod_revision) for ghost in ghosts}
    return [name for name, key in keys if (name, key.create_revision, key.mod_revision) not in passed_over][:places]


def written_by_nodes(found: Iterable[KeyValue], keys: RunKeys) -> list[tuple[str, KeyValue]]:
    """The keys of ``found`` that nodes have written, with the nodes' names: leased keys with valid node names.

    Any other key below ``nodes/`` would occupy one of the first places for ever, and keep real nodes from deciding.
    """
    named = ((keys.node_id(item.key), item) for item in found)
    return [(name, item) for name, item in named if name is not None and item.lease]


def is_surplus_watcher(document: RoundDocument | None, older: int, present: int) -> bool:
    """Whether a node can stop watching the nodes, ``older`` of the ``present`` ones being more senior."""
    on = document is not None and document.state is RoundState.ACTIVE
    return on and older >= SENIORS and present > CROWD
