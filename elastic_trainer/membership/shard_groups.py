"""Forms shard groups of several nodes, by the places whose shards their workers hold. Pure.

A node keeps its place while its workers live: they hold that place's shards. A round consists of whole groups,
ranks group by group, so member i of a round is at place ``i % size`` of group ``i // size``. Nodes without a group are
spares until another node takes the missing place. In restart mode any node can have any place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from elastic_trainer.membership.cluster_view import (
    ClusterView,
    Limits,
    NodeView,
    candidates,
    in_call,
    living,
)
from elastic_trainer.membership.documents import NodeState, RoundState
from elastic_trainer.model import RecoveryMode


def has_places(limits: Limits) -> bool:
    """Whether nodes have fixed places, which they keep from round to round."""
    return limits.shard_nodes > 1 and limits.recovery is RecoveryMode.IN_PLACE


def in_groups(view: ClusterView, ready: Sequence[NodeView]) -> list[NodeView]:
    """The nodes of ``ready`` that form whole groups, group by group; within each place they keep their order.

    Whole groups of the present round stay together. The remaining nodes are grouped by place.
    """
    if not has_places(view.limits):
        return list(ready)
    size, known = view.limits.shard_nodes, {(node.id, node.create_revision): node for node in ready}
    members = [known.get(member[:2]) for member in view.round.members] if view.round is not None else []
    before = [members[first : first + size] for first in range(0, len(members), size)]
    intact = [found for group in before if (found := _whole(group))]
    kept = {node.id for group in intact for node in group}
    left = [[node for node in ready if node.record.place == place and node.id not in kept] for place in range(size)]
    return [node for group in (*intact, *zip(*left, strict=False)) for node in group]


def _whole(group: Sequence[NodeView | None]) -> list[NodeView]:
    """The nodes of ``group`` if all are present, each at its place; empty otherwise."""
    here = [node for i, node in enumerate(group) if node is not None and node.record.place == i]
    return here if len(here) == len(group) else []


def newest_groups(limits: Limits, members: Sequence[NodeView], count: int, held: dict[str, int]) -> list[NodeView]:
    """The ``count`` nodes of ``members`` (whole groups) that hold the newest steps ``held``, in their order."""
    size = limits.shard_nodes if has_places(limits) else 1
    groups = [members[first : first + size] for first in range(0, len(members), size)]
    newest = sorted(range(len(groups)), key=lambda i: -max(held.get(node.id, -1) for node in groups[i]))
    return [node for i in sorted(newest[: count // size]) for node in groups[i]]


# ---- which node takes which place


def place_of(nodes: Iterable[NodeView], me: str, size: int) -> int:
    """The place for new workers of ``me``: the rarest one among nodes whose workers are up or that are more senior.

    Nodes that start together each yield to the more senior ones, so they get different places.
    """
    known = {node.id: node for node in nodes}
    mine = known.get(me)
    earlier = [
        node.record.place
        for node in known.values()
        if node.record.place is not None
        and node is not mine
        and (mine is None or node.record.state is not NodeState.WARMING or node.create_revision < mine.create_revision)
    ]
    taken = Counter(earlier)
    rarest = [place for place in range(size) if taken[place] == min(taken[each] for each in range(size))]
    return mine.record.place if mine is not None and mine.record.place in rarest else rarest[0]


def move(view: ClusterView) -> tuple[NodeView, int] | None:
    """The spare that should restart its workers at another place to complete one more group, and that place.

    A spare without state goes first, then the one with the oldest state. A survivor in the middle of a call that only
    newcomers could complete to a whole group restarts too, at its own place: newcomers could not join that call.
    """
    limits, current = view.limits, view.round
    if not has_places(limits):
        return None
    stays = (NodeState.WARMING, NodeState.READY)
    present = [node for node in living(view) if node.record.state in stays]
    members = {member.node for member in current.members} if current is not None else set()
    at_work = members if current is not None and current.state is not RoundState.BROKEN else set()
    idle = [node for node in present if node.record.state is NodeState.READY and node.id not in at_work]
    supply = Counter(node.record.place for node in present)
    wanted = limits.fitting(len(present)) // limits.shard_nodes
    rarest = min(range(limits.shard_nodes), key=lambda place: supply[place])
    if supply[rarest] < wanted:
        able = [node for node in idle if supply[node.record.place] > wanted]
        return (min(able, key=_worth), rarest) if able else None
    ready = candidates(view)
    staying = in_call(view, ready)
    stranded = [node for node in staying if not node.record.joinable]
    if at_work or not stranded or in_groups(view, staying) or not in_groups(view, ready):
        return None
    return stranded[0], stranded[0].record.place or 0


def _worth(node: NodeView) -> tuple[int, int]:
    identity = node.record.identity
    return (identity.step if identity is not None else -1, -node.create_revision)
