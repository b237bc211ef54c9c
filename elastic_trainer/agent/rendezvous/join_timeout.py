"""Ends a node that has waited too long for a round: too few nodes came, or came back.

*Runs in* the agent: a thread named ``patience``. *Owns* that thread.
*Fails by* calling ``give_up`` once with the JoinTimeoutError.
*Invariant*: an unreachable store is no reason to end: nobody can form a round then, and training may go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patience", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self) -> None:
        since = self._clock.monotonic()
        while not self._clock.wait(self._stop, min(LOOK_EVERY_S, self._join_timeout_s / 4)):
            seen = self._member.look()
            mine = self._member.shown()
            waiting = (
                mine is not None and mine.state is not NodeState.WARMING
            )  # else it is others who wait for this one
            if not (waiting and seen.connected) or _under_way(seen):
                since = self._clock.monotonic()
            elif self._clock.monotonic() - since >= self._join_timeout_s:
                self._give_up(self._member.join_timeout(self._join_timeout_s))
                return


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
