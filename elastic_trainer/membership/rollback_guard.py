"""Detects a store that was rolled back behind what this node has seen, and decides what to write then. Pure.

An etcd that was restored from a backup, or that lost its data, holds an older round document than the one that the
workers train in. Round numbers only grow, so no node may continue from there: a node that knows a newer round writes
the end of that round, and the next round follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.membership.composition import broken
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.leader_priority import SENIORS
from elastic_trainer.membership.rules import Action, Decision

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
