"""Whom the next round leaves out when some of its members cannot reach each other. Pure.

Each of two nodes that are cut off from one another may reach the store and all the rest, so no lease ends and no agent
is found dead; yet no round with both of them can be formed, for ever.
"""

from __future__ import annotations

from collections import Counter

from elastic_trainer.membership.cluster_view import NodeView

FAILED_ROUNDS = 2
"""Rounds in a row that ended without a committed step before the word of one side alone is enough."""


def left_out(ready: list[NodeView], stalled: int, least: int) -> NodeView | None:
    """The node that most of the others could not reach, the last of equals; None if all may stay.

    ``ready`` would make up the next round, in this order, of which at least ``least`` have to be left. Two nodes that
    name each other count at once; of one that only others name it may be that it was slow for a moment.
    """
    if len(ready) <= least:
        return None
    named = Counter(name for node, name in _named(ready) if stalled >= FAILED_ROUNDS or (name, node) in _named(ready))
    most = max(named.values(), default=0)
    return next((node for node in reversed(ready) if most and named[node.id] == most), None)


def apart(ready: list[NodeView]) -> tuple[str, str] | None:
    """Two of ``ready`` that name each other: a round with both would be formed in vain."""
    named = _named(ready)
    return min(((node, name) for node, name in named if (name, node) in named), default=None)


def _named(ready: list[NodeView]) -> set[tuple[str, str]]:
    """Who of ``ready`` could not reach whom of them."""
    present = {node.id for node in ready}
    return {(node.id, name) for node in ready for name in node.record.unreachable if name in present - {node.id}}
