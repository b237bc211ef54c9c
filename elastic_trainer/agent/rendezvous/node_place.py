"""This node's place in shard groups of several nodes: taken before its workers start, changed while it is a spare.

*Runs in* torchrun's main thread (``take``) and a thread named ``places``, which it owns.
*Fails by* nothing: a place that another node also has leaves this node a spare until one of them changes.
*Invariant*: all workers of one life keep the same place, since they hold its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from elastic_trainer.agent.workers.conductor import Conductor
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.membership.cluster_view import ClusterView, NodeView, Sightings, living
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.shard_groups import has_places, move, place_of

SETTLE_S, SETTLES = 0.25, 20
"""How long nodes that start together wait to see each other's places, and how often."""
LOOK_S, STANDING_S = 2.0, 0.3
"""Interval at which a spare looks while others train, and while nobody does; with hundreds of nodes it is longer."""
CROWD = 50
PATIENCE_S = 30.0
"""How long a spare that holds state waits for another node to take the missing place of its group."""


class NodePlace:
    """See the module. ``nodes()`` are all nodes of the run, read from the store."""

    def __init__(
        self,
        member: Member,
        node: str,
        nodes: Callable[[], dict[str, NodeView]],
        conductor: Conductor,
        clock: Clock = SYSTEM,
    ) -> None:
        self._member, self._node, self._nodes, self._conductor = member, node, nodes, conductor
        self._clock = clock
        self._looked_at, self._crowd = -math.inf, 1.0
        self._since: float | None = None
        """Since when this node is the one that should restart its workers."""
        self._thread = PeriodicThread("places", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def take(self, announce: Callable[[int | None], None]) -> int | None:
        """Choose and announce the place of new workers; None if nodes have no places."""
        place = None
        for place in self.choices():
            announce(place)
            if place is not None:
                pause(SETTLE_S)
        return place

    def choices(self) -> Iterator[int | None]:
        """The place of new workers, and another one each time that the nodes which start with them are seen there."""
        if not has_places(self._member.limits):
            yield None
            return
        place = None
        for _ in range(SETTLES):
            view = self._view(self._nodes(), self._member.look().round)
            found = place_of(living(view), self._node, view.limits.shard_nodes)
            if found == place:
                return
            yield (place := found)

    def turn(self) -> float:
        """Restart the workers at another place if that completes a group; returns the seconds until the next look."""
        if not has_places(self._member.limits):
            return IDLE_S
        seen, mine = self._member.look(), self._member.published()
        current = seen.round
        trains = current is not None and current.state is not RoundState.BROKEN and current.member(self._node)
        if trains or mine is None or mine.state is not NodeState.READY or not seen.connected:
            self._since = None
            return LOOK_S
        stands = current is not None and current.state is RoundState.BROKEN
        now, look_s = self._clock.monotonic(), STANDING_S if stands else LOOK_S
        if now - self._looked_at < look_s * self._crowd:
            return STANDING_S
        nodes = self._nodes()
        self._looked_at, self._crowd = now, max(1.0, len(nodes) / CROWD)
        found = move(self._view(nodes, current))
        if found is None or found[0].id != self._node:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (PATIENCE_S if mine.identity is not None else look_s):
            self._since = None
            self._conductor.restart_workers(f"this spare is needed at place {found[1]} of a shard group")
        return STANDING_S

    def _view(self, nodes: dict[str, NodeView], current: RoundDocument | None) -> ClusterView:
        dead = self._member.found_dead(nodes)
        return ClusterView(self._node, nodes, current, self._member.limits, Sightings(), nonce="", suspects=dead)
