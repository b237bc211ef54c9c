"""Ends a node that has waited too long for a round: too few nodes came, or came back.

*Runs in* the agent: a thread named ``patience``. *Owns* that thread.
*Fails by* calling ``give_up`` once with the JoinTimeoutError.
*Invariant*: an unreachable store is no reason to end: nobody can form a round then, and training may go on.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_trainer.agent.workers.duty import IDLE_S, Duty
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import JoinTimeoutError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeState, RoundDocument, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.view import Observation

LOOK_EVERY_S = 0.5


class JoinTimeout:
    """Counts the time in which this node is ready and no round is on, up to ``join_timeout_s`` seconds."""

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
        self._duty = Duty("patience", self.turn, clock)

    def start(self) -> None:
        self._duty.start()

    def close(self) -> None:
        self._duty.close()

    def turn(self) -> float:
        """Look whether this node still waits; seconds until the next look."""
        seen, mine = self._member.look(), self._member.shown()
        waits = mine is not None and mine.state is not NodeState.WARMING  # else others wait for this node
        now = self._clock.monotonic()
        if not (waits and seen.connected) or _under_way(seen):
            self._since = now
        elif now - self._since >= self._join_timeout_s:
            self._give_up(self._member.join_timeout(self._join_timeout_s))
            return IDLE_S
        return self._pause_s


def _under_way(seen: Observation) -> bool:
    """Whether the run has ended, or a round is on, with members that live, or about to be on."""
    current = seen.round
    if current is None:
        return False
    if current.state is RoundState.BROKEN:  # whoever follows no nodes will, if this lasts
        return any(node.record.busy for node in _members(seen, current))
    if current.state is RoundState.CLOSED:
        return True
    if current.state is RoundState.DRAINING and current.next is None:
        return False  # too few will be left
    if not seen.follows_nodes:
        return True  # those who decide see to it
    return bool(_members(seen, current))


def _members(seen: Observation, current: RoundDocument) -> list[NodeView]:
    """The members of the round that are there."""
    keys = {(member.node, member.create_revision) for member in current.members}
    return [node for node in seen.nodes.values() if (node.id, node.create_revision) in keys]
