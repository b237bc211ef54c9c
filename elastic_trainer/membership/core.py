"""One node's state machine of the protocol: from what is seen and the time, what to do and when to look again. Pure.
Who is in a round is decided in membership.rules; this is who decides, and when.

A driver passes it what it sees, performs its effects in order, and passes their outcomes back with the next look.
Safety does not depend on the driver's speed: each commit compares the round and the key that the decision was based on.

*Who watches.* A watch on the nodes delivers every change of every node; if all nodes watched, N changes would cost
N x N events. So the most senior node, which decides, and its two deputies watch the nodes, and all others only the
round document. The next round document, which names the members with their create-revisions, shows that a decider is
gone. If all three are gone, nobody writes one; therefore all other nodes check from time to time which node is the most
senior.

*Who is dead.* The kernel of a node whose agent is dead refuses a connection to the agent's port. A timeout proves
nothing (a partition, a loaded host) and changes nothing.

*A store that was rolled back.* An etcd that was restored from a backup, or that lost its data, holds an older round
document than the one that the workers train in. Round numbers only grow, so no node may continue from there: a node
that knows a newer round writes the end of that round, and the next round follows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from elastic_trainer.membership.cluster_view import (
    ClusterView,
    Limits,
    NodeView,
    Observation,
    Sightings,
    Tracker,
    newcomers,
)
from elastic_trainer.membership.documents import Ghost, RoundDocument, RoundState
from elastic_trainer.membership.rules import Action, Decision, broken, decide
from elastic_trainer.wording import counted

# ---- what it is given


@dataclass(frozen=True, slots=True)
class Looked:
    """What this node knows about the run, and about its own key."""

    seen: Observation
    create_revision: int
    """Create-revision of this node's key; 0 while the key does not exist."""
    senior: bool
    """Whether it was among the most senior nodes when its key was created."""
    away: bool
    """Whether the key must be written (again): its lease has ended, or no write is known to have succeeded."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``effect`` was performed. With ``again_in_s`` it was not, and is tried again after that time."""

    effect: Effect
    again_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Oldest:
    """The answer to AskOldest: the ``seniors`` most senior nodes, ghosts excluded."""

    names: tuple[str, ...]
    seniors: int


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of ``node``, whose key was at ``mod_revision``, has ended."""

    node: str
    mod_revision: int
    dead: bool


Answer = Ended | Oldest | Probed


# ---- effects


@dataclass(frozen=True, slots=True)
class Notify:
    """Call the listeners with a new round document."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Return:
    """Write this node's record again under a new incarnation."""


@dataclass(frozen=True, slots=True)
class PublishAgain:
    """Write this node's record once more: the view was reloaded, so the store may hold an older record."""

    reloads: int


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Write the decided round document, guarded by ``seen``."""

    decision: Decision
    seen: Observation
    rolled_back: bool = False
    """Whether it brings a restored store forward to where the run was."""


@dataclass(frozen=True, slots=True)
class ChangeWatch:
    """Watch the nodes and the round, or the round alone."""

    nodes: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AskOldest:
    """Ask the store for the ``seniors`` most senior nodes, excluding ``ghosts``."""

    seniors: int
    ghosts: tuple[Ghost, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Connect to these nodes' agents: a kernel that refuses the connection proves its agent dead."""

    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class LogDelay:
    """Log why round ``after`` has no successor yet."""

    after: int
    reason: str


Effect = Notify | Return | PublishAgain | CommitRound | ChangeWatch | AskOldest | Probe | LogDelay


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What to do now, in this order, and the monotonic time of the next step if no event comes before."""

    effects: tuple[Effect, ...]
    next_at: float


# ---- the core


LOOK_AGAIN_S = 1.0


class Core:
    """The node ``node_id``. ``chance`` gives nonces and jitter; ``patience_s``: see WatchScope."""

    def __init__(self, node_id: str, limits: Limits, patience_s: float, chance: random.Random) -> None:
        self._node_id, self._limits, self._chance = node_id, limits, chance
        self._scope = WatchScope(node_id, patience_s, chance)
        self._probes = AgentProbes()
        self._delays = Delays()
        self._tracker = Tracker()
        self._memory = RollbackGuard()
        self._serial = 0
        """Of the last observation."""
        self._reloads = 0
        self._notified: tuple[int, str, tuple[int, int, int]] | None = None
        self._decided_on: tuple[int, frozenset[tuple[str, int]]] | None = None
        """The serial of the observation behind ``_view``, and who was known to be dead."""
        self._view: ClusterView | None = None
        self._silent: list[NodeView] = []
        """The nodes of that view to probe."""
        self._decides_at = 0.0
        """When the decision on that view is due, monotonic."""
        self._held: tuple[int, float] | None = None
        """Until this time nothing is decided, unless the view's serial has changed."""
        self._effects: list[Effect] = []

    def step(self, answers: Iterable[Answer], look: Looked, now: float) -> TurnOutcome:
        """Take in what came of earlier effects, and decide on ``look``.

        Returns at most one write, and the next step follows as soon as that has ended.
        """
        self._effects = []
        for answer in answers:
            self._take(answer, now)
        self._serial = look.seen.serial
        if self._held is not None and self._held[0] == self._serial and now < self._held[1]:
            return TurnOutcome(tuple(self._effects), self._held[1])
        self._held = None
        again_s = self._turn(look, now)
        return TurnOutcome(tuple(self._effects), now + min(LOOK_AGAIN_S, again_s))

    def _take(self, answer: Answer, now: float) -> None:
        if isinstance(answer, Ended):
            if answer.again_in_s is not None:
                self._held = (self._serial, now + answer.again_in_s)
            elif isinstance(answer.effect, PublishAgain):
                self._reloads = answer.effect.reloads
        elif isinstance(answer, Probed):
            self._probes.on_probed(answer)
        elif (follow := self._scope.on_oldest(answer, now)) is not None:
            self._effects.append(follow)

    def _turn(self, look: Looked, now: float) -> float:
        """Decide on one observation; returns the seconds until the next look if nothing changes."""
        seen = look.seen
        self._memory = self._memory.advance(seen.round, now)
        self._notify(seen)
        if look.away:
            return self._do(Return())
        if seen.reloads != self._reloads:
            return self._do(PublishAgain(seen.reloads))
        if self._memory.behind:
            return self._put_back(seen, now)
        change, scope_s = self._scope.adjust(look, now)
        if change is not None:
            self._effects.append(change)
        if seen.follows_nodes:
            return min(scope_s, self._decide(seen, now))
        same = seen.round_revision == self._tracker.round_revision
        round_since = self._tracker.sightings.round_since if same else now
        self._tracker = Tracker(Sightings(round_since=round_since), round_revision=seen.round_revision)
        return scope_s

    def _do(self, effect: Effect) -> float:
        self._effects.append(effect)
        return 0.0

    def _decide(self, seen: Observation, now: float) -> float:
        """Decide when something has changed, or the last decision is due again; meanwhile only probe."""
        found = seen.serial, self._probes.found
        if found != self._decided_on or self._view is None:
            self._decided_on, self._decides_at = found, now
            fresh = self._view_of(seen)
            self._tracker = self._tracker.advance(fresh, seen.round_revision, now)
            self._view, self._silent = fresh.since(self._tracker.sightings), unconfirmed(fresh)
        view = self._view
        if not seen.decidable:
            return math.inf
        if now >= self._decides_at:
            decision = decide(view, now)
            if (delayed := self._delays.observe(seen.round, decision, now)) is not None:
                self._effects.append(delayed)
            if decision.action is not Action.WAIT:
                self._decided_on = None  # with another nonce next time
                return self._do(CommitRound(decision, seen))
            self._decides_at = now + min(LOOK_AGAIN_S, decision.again_in_s)
        probe, probing_s = self._probes.is_due(self._silent, now)
        if probe is not None:
            self._effects.append(probe)
        return min(probing_s, self._decides_at - now)

    def _put_back(self, seen: Observation, now: float) -> float:
        """The store was rolled back: end the newest known round in it, so that the next one follows that."""
        decision = self._memory.decide(self._node_id, seen.round, now)
        if decision.action is Action.WAIT:
            return decision.again_in_s
        return self._do(CommitRound(decision, seen, rolled_back=True))

    def _notify(self, seen: Observation) -> None:
        if seen.round is None or self._memory.behind:
            return
        # A restored store reuses revisions: this revision alone may also be that of an older document.
        news = (seen.round_revision, seen.round.nonce, position(seen.round))
        if news != self._notified:
            self._notified = news
            self._effects.append(Notify(seen.round))

    def _view_of(self, seen: Observation) -> ClusterView:
        return ClusterView(
            me=self._node_id,
            nodes=seen.nodes,
            round=seen.round,
            limits=self._limits,
            sightings=self._tracker.sightings,
            nonce=f"{self._chance.getrandbits(64):016x}",
            suspects=self.found_dead(seen.nodes),
        )

    def found_dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """Those of ``nodes`` whose agents are known to be dead. In any thread."""
        return self._probes.dead(nodes)


# ---- who watches the nodes


SENIORS = 3
"""The decider and its deputies."""
DEPUTY_PATIENCE_S = 1.0
"""Seconds after the end of a round at which the next most senior nodes start to watch the nodes too."""
CROWD = 16
"""Up to this many nodes all may watch, so nobody stops."""
LONGEST_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What a node that watches only the round does after ``after_s`` seconds without news.

    ``seniors``: ask the store for this many of the oldest nodes, and watch the nodes if this one is among them; None:
    watch them without asking.
    """

    after_s: float
    seniors: int | None


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
    # Each further question asks for three more nodes, which passes over deciders that live but do nothing.
    return Plan(asked_at_s + patience_s * min(2**asked, LONGEST_PATIENCE), SENIORS * (1 + asked))


def elders(document: RoundDocument | None, create_revision: int) -> int:
    """The number of members of the round that are more senior."""
    members = document.members if document is not None else ()
    return sum(member.create_revision < create_revision for member in members)


LEASE_SLACK_S = 1.0
"""How late a lease may end after its TTL (etcd checks twice a second)."""
JITTER = 0.25
Turn = tuple[ChangeWatch | AskOldest | None, float]
"""An effect, and the seconds until the next turn if nothing changes."""


class WatchScope:
    """Decides by seniority whether a node watches the nodes and the round, or the round alone.

    ``patience_s``: the time after which a silent node's lease has ended.
    """

    def __init__(self, node_id: str, patience_s: float, chance: random.Random) -> None:
        self._node_id, self._patience_s, self._chance = node_id, patience_s, chance
        self._news: tuple[int, int] = (-1, 0)
        self._quiet_since = 0.0
        self._asked = 0
        self._asked_at_s = 0.0
        self._spread = 1.0
        self._junior_since: float | None = None

    def adjust(self, look: Looked, now: float) -> Turn:
        """Widen or narrow what this node watches, if that is due."""
        mine = look.create_revision
        if mine == 0 or look.seen.changing:
            return None, math.inf
        return self._narrow(look, now) if look.seen.follows_nodes else self._widen(look, now)

    def on_oldest(self, answer: Oldest, now: float) -> ChangeWatch | None:
        """Take in the store's answer, the most senior nodes."""
        if self._node_id in answer.names:
            return ChangeWatch(nodes=True, reason=f"it is among the {answer.seniors} most senior")
        self._asked += 1
        self._asked_at_s = (now - self._quiet_since) / self._spread
        return None

    def _widen(self, look: Looked, now: float) -> Turn:
        seen, mine = look.seen, look.create_revision
        if self._news != (seen.round_revision, mine):
            shown_anew = self._news[1] != mine
            self._forget((seen.round_revision, mine), now)
            if shown_anew and look.senior:
                return ChangeWatch(nodes=True, reason="it is among the most senior"), math.inf
        due = plan(seen.round, self._node_id, mine, self._asked, self._asked_at_s, self._patience_s)
        left = due.after_s * self._spread - (now - self._quiet_since)
        if left > 0.0:
            return None, left
        if due.seniors is None:
            return ChangeWatch(nodes=True, reason="the round is over and no node acts"), math.inf
        return AskOldest(due.seniors, seen.round.ghosts if seen.round is not None else ()), 0.0

    def _narrow(self, look: Looked, now: float) -> Turn:
        """Stop watching the nodes once enough more senior nodes have watched them for a while."""
        seen, mine = look.seen, look.create_revision
        if len(seen.nodes) <= CROWD:
            self._junior_since = None
            return None, math.inf
        ghosts = seen.round.ghosts if seen.round is not None else ()
        alive = [node for node in seen.nodes.values() if node.ghost not in ghosts]
        older = sum(node.create_revision < mine for node in alive)
        active = seen.round is not None and seen.round.state is RoundState.ACTIVE
        if not active or older < SENIORS or len(alive) <= CROWD:
            self._junior_since = None
            return None, math.inf
        if self._junior_since is None:
            self._junior_since = now
        left = self._junior_since + self._patience_s * self._spread - now
        if left > 0.0:
            return None, left
        self._junior_since = None
        self._forget((seen.round_revision, mine), now)
        return ChangeWatch(nodes=False, reason=f"{counted(older, 'node is', 'nodes are')} more senior"), math.inf

    def _forget(self, news: tuple[int, int], now: float) -> None:
        self._news, self._quiet_since, self._asked, self._asked_at_s = news, now, 0, 0.0
        self._spread = self._chance.uniform(1.0, 1.0 + JITTER)  # so that a thousand nodes do not ask at once


# ---- who is dead


PROBE_TIMEOUT_S = 0.5
PROBE_INTERVAL_S = 0.1
PROBES_AT_ONCE = 32
"""A thousand nodes may be silent together; those probed longest ago come first."""


class AgentProbes:
    """The nodes whose agents were found dead, by the mod-revision of their keys."""

    def __init__(self) -> None:
        self.found: frozenset[tuple[str, int]] = frozenset()
        self._asked: dict[str, float] = {}
        self._asking = 0

    def dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        """The nodes whose keys have not changed since their agents were found dead. In any thread."""
        return frozenset(
            name for name, revision in self.found if name in nodes and nodes[name].mod_revision == revision
        )

    def on_probed(self, answer: Probed) -> None:
        self._asking -= 1
        if answer.dead:
            self.found |= {(answer.node, answer.mod_revision)}

    def is_due(self, silent: list[NodeView], now: float) -> tuple[Probe | None, float]:
        """Which of the ``silent`` nodes to probe now, and the seconds until the next look is due."""
        if not silent:
            return None, math.inf
        before = now - PROBE_INTERVAL_S
        due = sorted((self._asked.get(node.id, before), node.id, node) for node in silent)
        chosen = tuple(node for asked, _, node in due if asked <= before)[: PROBES_AT_ONCE - self._asking]
        self._asking += len(chosen)
        self._asked.update((node.id, now) for node in chosen)
        return Probe(chosen) if chosen else None, PROBE_INTERVAL_S


def unconfirmed(view: ClusterView) -> list[NodeView]:
    """The nodes that must be alive for the next transition and have sent no recent news.

    These are members of a broken or draining round that have not reported that they are free, and newcomers about to be
    added: a round with a dead node would make no progress until its lease ends.
    """
    return [
        node
        for node in _awaited(view)
        if node.id != view.me and node.id not in view.suspects and node.record.probe_port > 0
    ]


def _awaited(view: ClusterView) -> list[NodeView]:
    current = view.round
    if current is None or current.state is RoundState.CLOSED:
        return []
    if current.state is RoundState.ACTIVE:
        return newcomers(view)[: max(0, view.limits.max_nodes - len(current.members))]
    silent = [node for _, node in view.living_members if node.record.acknowledged <= current.number]
    if current.next is None:
        return silent
    joining = {member.node for member in current.next.members} - {member.node for member in current.members}
    return silent + [view.nodes[name] for name in sorted(joining) if name in view.nodes]


# ---- a store that was rolled back


OTHERS_AFTER_S = 2.0
"""Seconds that the first members of the round have to write it back before all others try too."""
STATE_ORDER = {RoundState.ACTIVE: 0, RoundState.DRAINING: 1, RoundState.BROKEN: 2, RoundState.CLOSED: 3}
"""The order of a round's states."""


def position(document: RoundDocument | None) -> tuple[int, int, int]:
    """A run's progress by its round document; it never decreases while the store keeps its data."""
    if document is None:
        return (0, -1, 0)
    return (document.epoch, document.number, STATE_ORDER[document.state])


@dataclass(frozen=True, slots=True)
class RollbackGuard:
    """The furthest round document that this node has seen, and since when the store is behind it."""

    known: RoundDocument | None = None
    behind_since: float | None = None

    def advance(self, seen: RoundDocument | None, now: float) -> RollbackGuard:
        """The guard after ``seen`` was found in the store at ``now`` (monotonic seconds)."""
        if seen is self.known and not self.behind:
            return self
        if position(seen) >= position(self.known) and not self._is_another(seen):
            return RollbackGuard(seen)
        return RollbackGuard(self.known, now if self.behind_since is None else self.behind_since)

    def _is_another(self, seen: RoundDocument | None) -> bool:
        """Whether ``seen`` was formed in a rolled-back store under the number of a known round."""
        if seen is None or self.known is None or position(seen) != position(self.known):
            return False
        return seen.nonce != self.known.nonce and seen.state in (RoundState.ACTIVE, RoundState.DRAINING)

    @property
    def behind(self) -> bool:
        return self.behind_since is not None

    def decide(self, me: str, seen: RoundDocument | None, now: float) -> Decision:
        """What node ``me`` does about a store that is behind."""
        if self.known is None or self.behind_since is None:
            return Decision(Action.WAIT, "the store is not behind")
        first = [member.node for member in self.known.members[:SENIORS]]
        left = 0.0 if me in first else self.behind_since + OTHERS_AFTER_S - now
        if left > 0.0:
            return Decision(Action.WAIT, "the first members write the round back", again_in_s=left)
        at = "nothing" if seen is None else f"round {seen.number}, {seen.state}"
        reason = f"the store was rolled back to an older state ({at})"
        if self.known.state is RoundState.CLOSED:
            return Decision(Action.CLOSE, reason, self.known)
        if seen is not None and seen.next is not None and seen.next.number > self.known.number:
            return Decision(Action.BREAK, reason, broken(seen, reason))  # newcomers may already be forming it
        if self.known.state is RoundState.BROKEN:
            return Decision(Action.BREAK, reason, self.known)
        return Decision(Action.BREAK, reason, broken(self.known, reason))


# ---- a broken round without a successor


MIN_DELAY_S: Final = 1.0


class Delays:
    """Why a broken round has no successor yet: logs each reason once, when it has lasted for a second."""

    def __init__(self) -> None:
        self._wait: tuple[int, str] | None = None
        self._since = 0.0
        self._logged = False

    def observe(self, current: RoundDocument | None, decision: Decision, now: float) -> LogDelay | None:
        """Take in ``decision``, made at monotonic time ``now``; returns what to log, if anything."""
        waits = current is not None and current.state is RoundState.BROKEN and decision.round is None
        wait = (current.number, decision.reason) if waits and current is not None else None
        if wait != self._wait:
            self._wait, self._since, self._logged = wait, now, False
        if wait is None or self._logged or now - self._since < MIN_DELAY_S:
            return None
        self._logged = True
        return LogDelay(*wait)
