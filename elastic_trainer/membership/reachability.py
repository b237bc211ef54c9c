"""Which node the next round excludes when some of its members cannot reach each other. Pure.

Two nodes that cannot reach each other may both reach the store and all other nodes, so no lease ends and no agent is
found dead; yet no round with both of them can ever form.
"""

from __future__ import annotations

from collections import Counter

from elastic_trainer.membership.cluster_view import NodeView

FAILED_ROUNDS = 2
"""Consecutive rounds without a committed step after which the report of one side alone is enough."""


def left_out(ready: list[NodeView], stalled: int, least: int) -> NodeView | None:
    """The node that most others could not reach, the last one in case of a tie; None if all may stay.

    ``ready`` would form the next round, in this order; at least ``least`` nodes have to remain. Two nodes that report
    each other count at once; a node that only others report may just have been slow for a moment.
    """
    if len(ready) <= least:
        return None
    named = Counter(name for node, name in _named(ready) if stalled >= FAILED_ROUNDS or (name, node) in _named(ready))
    most = max(named.values(), default=0)
    return next((node for node in reversed(ready) if most and named[node.id] == most), None)


def apart(ready: list[NodeView]) -> tuple[str, str] | None:
    """Two of ``ready`` that report each other: a round with both could not form."""
    named = _named(ready)
    return min(((node, name) for node, name in named if (name, node) in named), default=None)


def _named(ready: list[NodeView]) -> set[tuple[str, str]]:
    """Pairs of ``ready``: the first could not reach the second."""
    present = {node.id for node in ready}
    return {(node.id, name) for node in ready for name in node.record.unreachable if name in present - {node.id}}
