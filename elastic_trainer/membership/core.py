"""One node's state machine of the protocol: from events and the time, what to do and when to look again. Pure.

A driver passes it events, performs its effects in order, and passes their outcomes back as events. Safety does not
depend on the driver's speed: each commit compares the round and the key that the decision was based on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView, Sightings
from elastic_trainer.membership.delays import Delays
from elastic_trainer.membership.effects import (
    AskOldest,
    CommitRound,
    Effect,
    Event,
    Looked,
    Notify,
    Oldest,
    Probed,
    PublishAgain,
    Return,
    TurnOutcome,
)
from elastic_trainer.membership.probe import AgentProbes
from elastic_trainer.membership.rollback_guard import RollbackGuard, position
from elastic_trainer.membership.rules import Action, decide
from elastic_trainer.membership.sightings import Tracker
from elastic_trainer.membership.view import Observation
from elastic_trainer.membership.watch_scope import WatchScope

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
        self._look: Looked | None = None
        self._asked: AskOldest | None = None
        self._reloads = 0
        self._notified: tuple[int, str, tuple[int, int, int]] | None = None
        self._held: tuple[int, float] | None = None
        """Until this time nothing is decided, unless the view's serial has changed."""
        self._effects: list[Effect] = []

    def step(self, events: Iterable[Event], now: float) -> TurnOutcome:
        """Process ``events``; returns at most one write, and the next step follows as soon as that has ended."""
        self._effects = []
        for event in events:
            self._take(event, now)
        if self._look is None:
            return TurnOutcome((), now + LOOK_AGAIN_S)
        if self._held is not None and self._held[0] == self._look.seen.serial and now < self._held[1]:
            return TurnOutcome(tuple(self._effects), self._held[1])
        self._held = None
        again_s = self._turn(self._look, now)
        return TurnOutcome(tuple(self._effects), now + min(LOOK_AGAIN_S, again_s))

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, Looked):
            self._look = event
        elif isinstance(event, Probed):
            self._probes.on_probed(event)
        elif isinstance(event, Oldest):
            places = self._asked.places if self._asked is not None else 0
            if (follow := self._scope.on_oldest(event, places, now)) is not None:
                self._effects.append(follow)
        elif event.again_in_s is not None:
            self._held = (self._look.seen.serial if self._look is not None else 0, now + event.again_in_s)
        elif isinstance(event.effect, PublishAgain):
            self._reloads = event.effect.reloads

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
        change, scope_s = self._scope.turn(look, now)
        if change is not None:
            self._asked = change if isinstance(change, AskOldest) else None
            self._effects.append(change)
        self._track(seen, now)
        return min(scope_s, self._decide(seen, now)) if seen.decidable else scope_s

    def _do(self, effect: Effect) -> float:
        self._effects.append(effect)
        return 0.0

    def _decide(self, seen: Observation, now: float) -> float:
        view = self._view(seen)
        decision = decide(view, now)
        if (delayed := self._delays.note(seen.round, decision, now)) is not None:
            self._effects.append(delayed)
        if decision.action is not Action.WAIT:
            return self._do(CommitRound(decision, seen))
        probe, probing_s = self._probes.turn(view, now)
        if probe is not None:
            self._effects.append(probe)
        return min(probing_s, decision.again_in_s if decision.again_in_s is not None else LOOK_AGAIN_S)

    def _put_back(self, seen: Observation, now: float) -> float:
        """The store was rolled back: end the newest known round in it, so that the next one follows that."""
        decision = self._memory.decide(self._node_id, seen.round, now)
        if decision.action is Action.WAIT:
            return decision.again_in_s if decision.again_in_s is not None else LOOK_AGAIN_S
        return self._do(CommitRound(decision, seen, rolled_back=True))

    def _track(self, seen: Observation, now: float) -> None:
        """Update the sightings; a node that does not watch the nodes has none of them."""
        if seen.follows_nodes:
            self._tracker = self._tracker.advance(self._view(seen), seen.round_revision, now)
        else:
            same = seen.round_revision == self._tracker.round_revision
            round_since = self._tracker.sightings.round_since if same else now
            self._tracker = Tracker(Sightings(round_since=round_since), round_revision=seen.round_revision)

    def _notify(self, seen: Observation) -> None:
        if seen.round is None or self._memory.behind:
            return
        # A restored store reuses revisions: this revision alone may also be that of an older document.
        news = (seen.round_revision, seen.round.nonce, position(seen.round))
        if news != self._notified:
            self._notified = news
            self._effects.append(Notify(seen.round))

    def _view(self, seen: Observation) -> ClusterView:
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
