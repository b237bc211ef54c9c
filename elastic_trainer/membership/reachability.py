"""Which node the next round excludes when some of its members cannot reach each other. Pure.

Two nodes that cannot reach each other may both reach the store and all other nodes, so no lease ends and no agent is
found dead; yet no round with both of them can ever form. The others train on without one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeRecord

FAILED_ROUNDS = 2
"""Consecutive rounds without a committed step after which the report of one side alone is enough."""
UNFORMED_ROUNDS = 4
"""Consecutive rounds that could not be formed after which the last to come is left out, though nobody names it."""
HINT = "to check, run 'elastic-trainer doctor --endpoint HOST:2379 --run-id check --peers 2' on both"


def left_out(tried: list[NodeView], stalled: int) -> NodeView | None:
    """The node that most others could not reach, the last one in case of a tie; None if all may stay.

    ``tried`` were in the round that failed, in this order. Two nodes that report each other count at once; a node that
    only others report may just have been slow for a moment. One that names itself knows better than all others.
    """
    if culprits := [node for node in tried if names_itself(node)]:
        return culprits[-1]
    pairs = _named(tried)
    named = Counter(name for node, name in pairs if stalled >= FAILED_ROUNDS or (name, node) in pairs)
    most = max(named.values(), default=0)
    return next((node for node in reversed(tried) if most and named[node.id] == most), None)


def names_itself(node: NodeView) -> bool:
    """Whether it knows that others cannot reach its workers; its ``cause`` says why."""
    return node.id in node.record.unreachable


def last_to_come(tried: list[NodeView], unformed: int) -> NodeView | None:
    """The last of ``tried`` if round after round could not be formed and no node is named; else None.

    The network may let the agents through and not the workers. The round without it shows whether it was the cause.
    """
    return tried[-1] if tried and unformed >= UNFORMED_ROUNDS else None


def blamed(tried: str, others: Mapping[str, NodeRecord]) -> str | None:
    """The one of ``others`` that a worker did not reach at the address ``tried``; None if that is not known.

    Who announces that address alone, or the only one that there is. A worker that waited in vain tried none: the other
    may have died.
    """
    if not tried:
        return None
    found = [name for name, record in others.items() if record.address == tried] or list(others)
    return found[0] if len(found) == 1 else None


def cannot_reach(node: str, other: str, announced: str, tried: str, why: str) -> str:
    """The sentence for people; ``tried``: where ``node`` looked for ``other``, if known."""
    at = f"{announced}, which {other} announces"
    if tried not in ("", announced):
        at = f"{tried}, which its worker published, while its agent announces {announced}"
    return f"node {node} cannot reach node {other} at {at} ({why}); {HINT}"


def misleads(node: str, interfaces: str) -> str:
    """The sentence about a node whose gloo was bound to loopback interfaces by the user."""
    return (
        f"workers of node {node} publish 127.0.0.1, which no other host reaches: GLOO_SOCKET_IFNAME={interfaces};"
        " unset it there, or name an interface that other hosts reach"
    )


def apart(ready: list[NodeView]) -> tuple[str, str] | None:
    """Two of ``ready`` that report each other: a round with both could not form."""
    named = _named(ready)
    return min(((node, name) for node, name in named if (name, node) in named), default=None)


def _named(ready: list[NodeView]) -> set[tuple[str, str]]:
    """Pairs of ``ready``: the first could not reach the second."""
    present = {node.id for node in ready}
    return {(node.id, name) for node in ready for name in node.record.unreachable if name in present - {node.id}}
