"""The cluster view: everything that a membership decision depends on, and queries on it. Pure.

Shard groups are one: a node keeps its slot in a group while its workers live, since they hold that slot's shards. A
round consists of whole groups, ranks group by group, so member i of a round is at slot ``i % size`` of group
``i // size``. Nodes without a group are spares until another node takes the missing slot. In restart mode any node can
have any slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from elastic_trainer.membership.documents import Ghost, NodeRecord, NodeState, RoundDocument, RoundState
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
class Observation:
    """A consistent snapshot of the run. ``nodes`` is empty for a node that watches only the round."""

    nodes: dict[str, NodeView]
    round: RoundDocument | None
    round_revision: int
    """Mod-revision of the round document; 0 if there is none."""
    connected: bool
    serial: int
    """Increases with each change, so that a waiter knows whether it has seen the newest."""
    follows_nodes: bool = True
    revision: int = 0
    """The observation includes every change up to this revision of the store."""
    reloads: int = 0
    """How often everything had to be reloaded, because the store's history had a gap or was replaced."""
    changing: bool = False
    """Whether another feed has been opened and has not replaced the present one yet."""

    @property
    def decidable(self) -> bool:
        """Whether the nodes are known, as of the round document's revision or later."""
        return self.follows_nodes and self.revision >= self.round_revision


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


class ClusterView:
    """The input of a membership decision. What a decision asks for many times is worked out once.

    ``nonce``: a fresh random name for the round that this decision may form. ``suspects``: nodes whose agent's port
    refuses connections: their process is gone.
    """

    def __init__(
        self,
        me: str,
        nodes: Mapping[str, NodeView],
        round: RoundDocument | None,
        limits: Limits,
        sightings: Sightings,
        nonce: str,
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.me, self.nodes, self.round, self.limits = me, nodes, round, limits
        self.sightings, self.nonce, self.suspects = sightings, nonce, suspects
        members, ghosts = (round.members, round.ghosts) if round is not None else ((), ())
        self.members = {member.node: member for member in members}
        self.ghosts = {(each.node, each.create_revision, each.mod_revision, each.life) for each in ghosts}
        """The keys that the round excludes."""
        self.living_members = [
            (member, node)
            for member in members
            if (node := nodes.get(member.node)) is not None
            and node.create_revision == member.create_revision
            and not is_ghost(self, node)
        ]
        """Members of the round whose key, of the same create-revision, still exists; in rank order."""
        living = [node for node in nodes.values() if node.id not in suspects and not is_ghost(self, node)]
        self.living = sorted(living, key=attrgetter("create_revision"))
        """The nodes, oldest key first, without those that were found dead, by this node or by who formed the round:
        their leases may stand."""
        ready = NodeState.READY
        willing = [n for n in self.living if n.record.state is ready and is_free(self, n) and not n.record.stuck]
        order = {member.node: rank for rank, (member, _) in enumerate(self.living_members)}
        self.candidates = sorted(willing, key=lambda node: order.get(node.id, len(order)))
        """Nodes that are free and ready for the next round: survivors in rank order, then newcomers."""

    def since(self, sightings: Sightings) -> ClusterView:
        """The same with other ``sightings``."""
        other = object.__new__(ClusterView)
        other.__dict__.update(self.__dict__, sightings=sightings)
        return other


def is_ghost(view: ClusterView, node: NodeView) -> bool:
    """Whether the round excludes this node and its key has not changed since."""
    return (node.id, node.create_revision, node.mod_revision, node.record.life) in view.ghosts


def accused(view: ClusterView) -> list[NodeView]:
    """Members that were suspected of not answering when the round was broken, and whose keys have not changed since."""
    current = view.round
    if current is None or current.state is not RoundState.BROKEN:
        return []
    keys = [view.nodes[member.node] for member in current.members if member.node in view.nodes]
    return [node for node in keys if is_ghost(view, node)]


def is_free(view: ClusterView, node: NodeView) -> bool:
    """Whether this life of the node is not a member of the present round, or its workers have left it.

    A key with an earlier life than the round names is from before a rollback of the store: the node will write again.
    """
    member = view.members.get(node.id)
    if member is None or member.create_revision != node.create_revision or node.record.life > member.life:
        return True
    return node.record.reported > number_of(view)


def same_life(view: ClusterView, node: NodeView) -> bool:
    """Whether this life of the node is a member of the present round."""
    member = view.members.get(node.id)
    return member is not None and (member.create_revision, member.life) == (node.create_revision, node.record.life)


def in_call(view: ClusterView, ready: Sequence[NodeView]) -> list[NodeView]:
    """Those of ``ready`` that must complete a call of all ranks together; empty if there is none.

    They are at one point of the script: they have met in one round there, and that is the one of most survivors.
    """
    if all(node.record.joinable for node in ready):
        return []
    survivors = [node for node in ready if same_life(view, node) and not node.record.newcomer]
    some = survivors or [each for each in ready if not each.record.joinable]
    rounds = Counter(met for node in some for met in node.record.met)
    most = max(rounds, key=lambda met: rounds[met], default=None)
    together = [node for node in ready if most in node.record.met] if most is not None else survivors
    return together if any(not node.record.joinable for node in together) else []


def number_of(view: ClusterView) -> int:
    """The number of the present round; 0 before the first."""
    return 0 if view.round is None else view.round.number


def next_number(view: ClusterView) -> int:
    """The first unused round number. A number that a planned change has named counts as used: newcomers may already be
    forming that round."""
    return (0 if view.round is None else view.round.last_number) + 1


def newcomers(view: ClusterView) -> list[NodeView]:
    """Candidates that are not members of the present round."""
    members = {member.node for member, _ in view.living_members}
    return [node for node in view.candidates if node.id not in members]


def lost_members(view: ClusterView) -> dict[str, str]:
    """Why the present round cannot continue: a phrase for each member that is lost or has left unplanned.

    During a planned change only members of the next round count; one whose agent is found dead is lost at once.
    """
    current = view.round
    if current is None:
        return {}
    needed = current.next.members if current.next else current.members
    live = {member.node: node for member, node in view.living_members}
    phrases = {}
    for member in needed:
        node = live.get(member.node)
        if node is None:  # one that a planned change adds
            found = view.nodes.get(member.node)
            node = found if found is not None and found.create_revision == member.create_revision else None
        if node is None or (current.next is not None and node.id in view.suspects):
            phrases[member.node] = f"node {member.node} is gone"
        elif node.record.life > member.life or (node.record.acknowledged > current.number and not node.record.planned):
            cause = f": {node.record.cause}" if node.record.cause else ""
            phrases[member.node] = f"node {member.node} left the round{cause}"
    return phrases


# ---- shard groups


def has_slots(limits: Limits) -> bool:
    """Whether nodes have fixed slots, which they keep from round to round."""
    return limits.shard_nodes > 1 and limits.recovery is RecoveryMode.IN_PLACE


def in_groups(view: ClusterView, ready: Sequence[NodeView]) -> list[NodeView]:
    """The nodes of ``ready`` that form whole groups, group by group; within each slot they keep their order.

    Whole groups of the present round stay together. The remaining nodes are grouped by slot.
    """
    if not has_slots(view.limits):
        return list(ready)
    size, known = view.limits.shard_nodes, {(node.id, node.create_revision): node for node in ready}
    members = [known.get(member[:2]) for member in view.round.members] if view.round is not None else []
    before = [members[first : first + size] for first in range(0, len(members), size)]
    intact = []
    for group in before:
        here = [node for i, node in enumerate(group) if node is not None and node.record.shard_slot == i]
        if len(here) == len(group):
            intact.append(here)
    kept = {node.id for group in intact for node in group}
    left = [[node for node in ready if node.record.shard_slot == slot and node.id not in kept] for slot in range(size)]
    return [node for group in (*intact, *zip(*left, strict=False)) for node in group]


def newest_groups(limits: Limits, members: Sequence[NodeView], count: int, held: dict[str, int]) -> list[NodeView]:
    """The ``count`` nodes of ``members`` (whole groups) that hold the newest steps ``held``, in their order."""
    size = limits.shard_nodes if has_slots(limits) else 1
    groups = [members[first : first + size] for first in range(0, len(members), size)]
    newest = sorted(range(len(groups)), key=lambda i: -max(held.get(node.id, -1) for node in groups[i]))
    return [node for i in sorted(newest[: count // size]) for node in groups[i]]


def slot_of(nodes: Iterable[NodeView], me: str, size: int) -> int:
    """The slot for new workers of ``me``: the rarest one among nodes whose workers are up or that are more senior.

    Nodes that start together each yield to the more senior ones, so they get different slots.
    """
    known = {node.id: node for node in nodes}
    mine = known.get(me)
    earlier = [
        node.record.shard_slot
        for node in known.values()
        if node.record.shard_slot is not None
        and node is not mine
        and (mine is None or node.record.state is not NodeState.WARMING or node.create_revision < mine.create_revision)
    ]
    taken = Counter(earlier)
    rarest = [slot for slot in range(size) if taken[slot] == min(taken[each] for each in range(size))]
    return mine.record.shard_slot if mine is not None and mine.record.shard_slot in rarest else rarest[0]


def move(view: ClusterView) -> tuple[NodeView, int] | None:
    """The spare that should restart its workers at another slot to complete one more group, and that slot.

    A spare without state goes first, then the one with the oldest state. A survivor in the middle of a call that only
    newcomers could complete to a whole group restarts too, at its own slot: newcomers could not join that call.
    """
    limits, current = view.limits, view.round
    if not has_slots(limits):
        return None
    stays = (NodeState.WARMING, NodeState.READY)
    present = [node for node in view.living if node.record.state in stays]
    members = {member.node for member in current.members} if current is not None else set()
    at_work = members if current is not None and current.state is not RoundState.BROKEN else set()
    idle = [node for node in present if node.record.state is NodeState.READY and node.id not in at_work]
    supply = Counter(node.record.shard_slot for node in present)
    wanted = limits.fitting(len(present)) // limits.shard_nodes
    rarest = min(range(limits.shard_nodes), key=lambda slot: supply[slot])
    if supply[rarest] < wanted:
        able = [node for node in idle if supply[node.record.shard_slot] > wanted]
        if not able:
            return None
        oldest_state = min(
            able, key=lambda node: (node.record.identity.step if node.record.identity else -1, -node.create_revision)
        )
        return oldest_state, rarest
    ready = view.candidates
    goes_on = in_call(view, in_groups(view, in_call(view, ready)))
    stranded = [node for node in ready if not node.record.joinable]
    if at_work or not stranded or goes_on or not in_groups(view, ready):
        return None
    return stranded[0], stranded[0].record.shard_slot or 0


# ---- since when


@dataclass(frozen=True, slots=True)
class Tracker:
    """The sightings, and the state that they were derived from."""

    sightings: Sightings = field(default_factory=Sightings)
    candidates: frozenset[tuple[str, int, int]] = frozenset()
    round_revision: int = -1

    def advance(self, view: ClusterView, round_revision: int, now: float) -> Tracker:
        before = self.sightings
        ready = view.candidates
        names = frozenset((node.id, node.create_revision, node.record.life) for node in ready)
        round_changed = round_revision != self.round_revision
        after = Sightings(
            candidates_since=now if names != self.candidates else before.candidates_since,
            enough_since=_since(
                before.enough_since, len(in_groups(view, ready)) >= view.limits.min_nodes, now, restart=round_changed
            ),
            newcomers_since=_since(before.newcomers_since, bool(newcomers(view)), now, restart=round_changed),
            round_since=now if round_changed else before.round_since,
            failing_since=_since(before.failing_since, bool(lost_members(view)), now, restart=round_changed),
        )
        return Tracker(after, names, round_revision)


def _since(before: float | None, holds: bool, now: float, *, restart: bool) -> float | None:
    if not holds:
        return None
    return now if before is None or restart else before
