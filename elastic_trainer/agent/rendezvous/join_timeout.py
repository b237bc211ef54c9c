"""Ends a node that has waited too long for a round because too few nodes joined.

*Runs in* the agent: a thread named ``join-timeout``. *Owns* that thread.
*Fails by* calling ``give_up`` once with the JoinTimeoutError.
*Invariant*: an unreachable store never ends the node: no round can form then, and training may continue.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import JoinTimeoutError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.view import Observation

LOOK_EVERY_S = 0.5


class JoinTimeout:
    """Counts the time in which this node is ready without a round in effect, up to ``join_timeout_s`` seconds."""

    def __init__(
        self,
        member: Member,
        join_timeout_s: float,
        give_up: Callable[[JoinTimeoutError], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._member, self._join_timeout_s, self._give_up, self._clock = member, join_timeout_s, give_up, clock
        self._pause_s = min(LOOK_EVERY_S, join_timeout_s / 4)
        self._since = clock.monotonic()
        self._thread = PeriodicThread("join-timeout", self.turn, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def turn(self) -> float:
        """Check whether this node still waits; returns the seconds until the next look."""
        seen, mine = self._member.look(), self._member.published()
        waits = mine is not None and mine.state is not NodeState.WARMING  # otherwise others wait for this node
        now = self._clock.monotonic()
        if not (waits and seen.connected) or _under_way(seen):
            self._since = now
        elif now - self._since >= self._join_timeout_s:
            self._give_up(self._member.join_timeout(self._join_timeout_s))
            return IDLE_S
        return self._pause_s


def _under_way(seen: Observation) -> bool:
    """Whether the run has ended, or a round with live members is in effect or soon will be."""
    current = seen.round
    if current is None:
        return False
    if current.state is RoundState.BROKEN:  # a node that watches only the round will watch the nodes if this lasts
        return any(node.record.busy for node in _members(seen, current))
    if current.state is RoundState.CLOSED:
        return True
    if current.state is RoundState.DRAINING and current.next is None:
        return False  # too few nodes will remain
    if not seen.follows_nodes:
        return True  # the deciding nodes handle it
    return bool(_members(seen, current))


def _members(seen: Observation, current: RoundDocument) -> list[NodeView]:
    """The members of the round that are present."""
    keys = {(member.node, member.create_revision) for member in current.members}
    return [node for node in seen.nodes.values() if (node.id, node.create_revision) in keys]
