"""Who watches the nodes: the most senior three, and in time whoever must take their place. Pure.

A watch on the nodes sees every change of every node; were all to watch, N changes would cost N x N events. So the most
senior node, which decides, and its two deputies watch the nodes, and everybody else the round document alone. That a
decider is gone shows in the next round document, which names the members with their create-revisions. Only when none
of the three is left does nobody write one; for that case everybody else looks from time to time who is the most senior.
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
"""Keys of no node among the oldest that are read in the same request."""
HEIR_PATIENCE_S = 1.0
"""Seconds after the end of a round at which those next in line watch the nodes beside the deciders."""
CROWD = 16
"""Up to this many nodes it does not matter who watches them, so nobody stops."""
LONGEST_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What a node that follows the round alone does ``after_s`` seconds of silence.

    ``places``: ask the store for this many of the oldest nodes, and watch the nodes if this one is among them; None:
    watch them without asking.
    """

    after_s: float
    places: int | None


def plan(
    document: RoundDocument | None, node: str, create_revision: int, asked: int, asked_at_s: float, patience_s: float
) -> Plan:
    """What ``node`` does if ``document`` stays as it is.

    ``asked``: how often it has asked since the document or its own key last changed, ``asked_at_s``: how many seconds
    after that it did so last. ``patience_s``: seconds until the leases of dead nodes have ended.
    """
    if document is not None and document.state is RoundState.CLOSED:
        return Plan(math.inf, None)
    line = elders(document, create_revision)
    member = document is not None and document.member(node) is not None
    if member and line < SENIORS and not asked:
        return Plan(0.0, SENIORS)
    if document is not None and document.state is RoundState.ACTIVE:
        # The further back, the more seldom: a thousand nodes ask as often as a hundred, and any number may be dead.
        return Plan(asked_at_s + patience_s * max(1, (line // SENIORS).bit_length()), SENIORS)
    if member and line < 2 * SENIORS:
        return Plan(HEIR_PATIENCE_S, None)
    # Deciders that live and yet do nothing are passed by, three more each time.
    return Plan(asked_at_s + patience_s * min(2**asked, LONGEST_PATIENCE), SENIORS * (1 + asked))


def elders(document: RoundDocument | None, create_revision: int) -> int:
    """How many members of the round are more senior."""
    members = document.members if document is not None else ()
    return sum(member.create_revision < create_revision for member in members)


def oldest_keys(keys: RunKeys, count: int) -> Read:
    """The ``count`` oldest keys of nodes, the oldest first; keys of no node among them cost no second request."""
    end = prefix_end(keys.nodes)
    return Read(keys.nodes, end, limit=count + STRAYS, order=Order.CREATE_REVISION, keys_only=True)


def first_names(keys: Iterable[tuple[str, KeyValue]], ghosts: Iterable[Ghost], places: int) -> list[str]:
    """The nodes that hold the first ``places`` of ``keys``, the oldest first, without ghosts (values are not known)."""
    passed_over = {(ghost.node, ghost.create_revision, ghost.mod_revision) for ghost in ghosts}
    return [name for name, key in keys if (name, key.create_revision, key.mod_revision) not in passed_over][:places]


def written_by_nodes(found: Iterable[KeyValue], keys: RunKeys) -> list[tuple[str, KeyValue]]:
    """What nodes have written among ``found``, with their names: their keys are leased, and have possible names.

    Anything else below ``nodes/`` would keep the first places for ever, and its neighbors from deciding.
    """
    named = ((keys.node_id(item.key), item) for item in found)
    return [(name, item) for name, item in named if name is not None and item.lease]


def is_one_too_many(document: RoundDocument | None, older: int, present: int) -> bool:
    """Whether a node that watches the nodes, ``older`` of the ``present`` ones being more senior, need not do so."""
    on = document is not None and document.state is RoundState.ACTIVE
    return on and older >= SENIORS and present > CROWD
