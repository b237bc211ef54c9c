"""The cluster view: everything that a membership decision depends on, and queries on it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from elastic_trainer.membership.documents import Ghost, NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Incarnation, RecoveryMode


@dataclass(frozen=True, slots=True)
class Limits:
    """The parameters of the rules; times in seconds."""

    min_nodes: int
    max_nodes: int
    recovery: RecoveryMode = RecoveryMode.RESTART
    last_call_s: float = 3.0
    last_call_limit_s: float = 60.0
    regroup_grace_s: float = 60.0
    join_batch_s: float = 1.0
    join_interval_s: float = 5.0
    deputy_delay_s: float = 0.25
    report_floor_s: float = 10.0
    suspect_grace_s: float = 0.05
    """Once a round is broken because a member did not answer: how long that member has at least to prove that it
    lives."""
    suspect_grace_limit_s: float = 1.0
    """And at most, however late the others are."""
    failure_limit: int = 3
    stalled_rounds: int = 10
    sizes: tuple[int, ...] = ()
    """Allowed node counts of a round, ascending; empty: every count from ``min_nodes`` to ``max_nodes``."""
    shard_nodes: int = 1
    """Nodes that together hold one sharded model; the node count of a round is a multiple of it."""

    def fitting(self, count: int) -> int:
        """The largest round that ``count`` nodes can form; 0 if they are too few."""
        allowed = self.sizes or range(self.min_nodes, min(count, self.max_nodes) + 1)
        return max((size for size in allowed if size <= count), default=0)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node's key, as read from the store."""

    id: str
    create_revision: int
    mod_revision: int
    record: NodeRecord

    @property
    def incarnation(self) -> Incarnation:
        """The life of the node that this key belongs to."""
        return Incarnation(self.create_revision, self.record.life)

    @property
    def ghost(self) -> Ghost:
        """The entry by which a round document excludes this key in its present version."""
        return Ghost(
            node=self.id,
            create_revision=self.create_revision,
            mod_revision=self.mod_revision,
            life=self.record.life,
        )


@dataclass(frozen=True, slots=True)
class Sightings:
    """Since when each present condition holds, on this node's monotonic clock."""

    candidates_since: float = 0.0
    """When the set of nodes that are ready for the next round last changed."""
    enough_since: float | None = None
    """Since when at least ``min_nodes`` nodes are ready."""
    newcomers_since: float | None = None
    """Since when there are newcomers."""
    round_since: float = 0.0
    """When the round document last changed."""
    failing_since: float | None = None
    """Since when a member is lost, or has left unplanned."""


@dataclass(frozen=True)
class ClusterView:
    """The input of a membership decision. What a decision asks for many times is worked out once."""

    me: str
    nodes: Mapping[str, NodeView]
    round: RoundDocument | None
    limits: Limits
    sightings: Sightings
    nonce: str
    """A fresh random name for the round that this decision may form."""
    suspects: frozenset[str] = field(default_factory=frozenset)
    """Nodes whose agent's port refuses connections: their process is gone."""

    @cached_property
    def members(self) -> Mapping[str, RoundMember]:
        """Those of the round, by name."""
        return {member.node: member for member in self.round.members} if self.round is not None else {}

    @cached_property
    def ghosts(self) -> frozenset[tuple[str, int, int, int]]:
        """The keys that the round excludes: node, create- and mod-revision, and life."""
        found = self.round.ghosts if self.round is not None else ()
        return frozenset((each.node, each.create_revision, each.mod_revision, each.life) for each in found)

    @cached_property
    def live(self) -> list[tuple[RoundMember, NodeView]]:
        """See :func:`live_members`."""
        if self.round is None:
            return []
        return [
            (member, node)
            for member in self.round.members
            if (node := self.nodes.get(member.node)) is not None
            and node.create_revision == member.create_revision
            and not is_ghost(self, node)
        ]

    @cached_property
    def candidates(self) -> list[NodeView]:
        """See :func:`candidates`."""
        willing = [
            node
            for node in by_seniority(self.nodes.values())
            if node.record.state is NodeState.READY
            and is_free(self, node)
            and not node.record.stuck
            and node.id not in self.suspects
            and not is_ghost(self, node)
        ]
        order = {member.node: rank for rank, (member, _) in enumerate(self.live)}
        return sorted(willing, key=lambda node: order.get(node.id, len(order)))


def by_seniority(nodes: Iterable[NodeView]) -> list[NodeView]:
    """Oldest key first."""
    return sorted(nodes, key=lambda node: node.create_revision)


def is_ghost(view: ClusterView, node: NodeView) -> bool:
    """Whether the round excludes this node and its key has not changed since."""
    return (node.id, node.create_revision, node.mod_revision, node.record.life) in view.ghosts


def living(view: ClusterView) -> list[NodeView]:
    """The nodes but for those that were found dead, by this node or by who formed the round: their leases may stand."""
    return [node for node in view.nodes.values() if node.id not in view.suspects and not is_ghost(view, node)]


def live_members(view: ClusterView) -> list[tuple[RoundMember, NodeView]]:
    """Members of the round whose key, of the same create-revision, still exists; in rank order."""
    return view.live


def accused(view: ClusterView) -> list[NodeView]:
    """Members that were suspected of not answering when the round was broken, and whose keys have not changed since."""
    current = view.round
    if current is None or current.state is not RoundState.BROKEN:
        return []
    keys = [view.nodes[member.node] for member in current.members if member.node in view.nodes]
    return [node for node in keys if is_ghost(view, node)]


def candidates(view: ClusterView) -> list[NodeView]:
    """Nodes that are free and ready for the next round: survivors in rank order, then newcomers."""
    return view.candidates


def is_free(view: ClusterView, node: NodeView) -> bool:
    """Whether this life of the node is not a member of the present round, or its workers have left it."""
    return not (same_life(view, node) or is_behind(view, node)) or node.record.reported > number_of(view)


def is_behind(view: ClusterView, node: NodeView) -> bool:
    """Whether its key holds an earlier life than the round document names: the store was rolled back, and the node will
    write its present record again."""
    member = view.members.get(node.id)
    return member is not None and member.create_revision == node.create_revision and node.record.life < member.life


def same_life(view: ClusterView, node: NodeView) -> bool:
    """Whether this life of the node is a member of the present round."""
    member = view.members.get(node.id)
    return member is not None and (member.create_revision, member.life) == (node.create_revision, node.record.life)


def in_call(view: ClusterView, ready: Sequence[NodeView]) -> list[NodeView]:
    """Those of ``ready`` that must complete a call of all ranks together; empty if there is none.

    They are at one place of the script: they have met in one round last, and that is the one of most survivors.
    """
    survivors = [node for node in ready if same_life(view, node) and not node.record.newcomer]
    rounds = Counter(node.record.met for node in survivors or [each for each in ready if not each.record.joinable])
    most = max(rounds, key=lambda met: rounds[met], default=None)
    together = [node for node in (ready if most else survivors) if node.record.met == most]
    return together if any(not node.record.joinable for node in together) else []


def number_of(view: ClusterView) -> int:
    """The number of the present round; 0 before the first."""
    return 0 if view.round is None else view.round.number


def newcomers(view: ClusterView) -> list[NodeView]:
    """Candidates that are not members of the present round."""
    members = {member.node for member, _ in live_members(view)}
    return [node for node in candidates(view) if node.id not in members]


def next_number(view: ClusterView) -> int:
    """The first unused round number. A number that a planned change has named counts as used: newcomers may already be
    forming that round."""
    return (0 if view.round is None else view.round.last_number) + 1


def losses(view: ClusterView) -> dict[str, str]:
    """Why the present round cannot continue: a phrase for each member that is lost or has left unplanned.

    During a planned change only members of the next round count; one whose agent is found dead is lost at once.
    """
    current = view.round
    if current is None:
        return {}
    needed = current.next.members if current.next else current.members
    live = {member.node: node for member, node in live_members(view)}
    phrases = {}
    for member in needed:
        node = live.get(member.node) or _newcomer(view, member)
        if node is None or (current.next is not None and node.id in view.suspects):
            phrases[member.node] = f"node {member.node} is gone"
        elif node.record.life > member.life or (node.record.acknowledged > current.number and not node.record.planned):
            cause = f": {node.record.cause}" if node.record.cause else ""
            phrases[member.node] = f"node {member.node} left the round{cause}"
    return phrases


def _newcomer(view: ClusterView, member: RoundMember) -> NodeView | None:
    """The newcomer that a planned change adds as ``member``."""
    node = view.nodes.get(member.node)
    return node if node is not None and node.create_revision == member.create_revision else None
