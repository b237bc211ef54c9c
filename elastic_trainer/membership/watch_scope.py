"""Decides by seniority whether a node watches the nodes and the round, or the round alone. Pure."""

from __future__ import annotations

import math
import random

from elastic_trainer.membership.effects import AskOldest, ChangeWatch, Looked, Oldest
from elastic_trainer.membership.leader_priority import is_surplus_watcher, plan
from elastic_trainer.wording import counted

LEASE_SLACK_S = 1.0
"""How late a lease may end after its TTL (etcd checks twice a second)."""
JITTER = 0.25

Turn = tuple[ChangeWatch | AskOldest | None, float]
"""An effect, and the seconds until the next turn if nothing changes."""


class WatchScope:
    """See the module. ``patience_s``: the time after which a silent node's lease has ended."""

    def __init__(self, node_id: str, patience_s: float, chance: random.Random) -> None:
        self._node_id, self._patience_s, self._chance = node_id, patience_s, chance
        self._news: tuple[int, int] = (-1, 0)
        self._quiet_since = 0.0
        self._asked = 0
        self._asked_at_s = 0.0
        self._spread = 1.0
        self._junior_since: float | None = None

    def turn(self, look: Looked, now: float) -> Turn:
        """Widen or narrow what this node watches, if that is due."""
        mine = look.create_revision
        if mine == 0 or look.seen.changing:
            return None, math.inf
        return self._narrow(look, now) if look.seen.follows_nodes else self._widen(look, now)

    def on_oldest(self, answer: Oldest, places: int, now: float) -> ChangeWatch | None:
        """Take in the store's answer, the most senior nodes."""
        if self._node_id in answer.names:
            return ChangeWatch(nodes=True, reason=f"it is among the {places} most senior")
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
        if due.places is None:
            return ChangeWatch(nodes=True, reason="the round is over and no node acts"), math.inf
        return AskOldest(due.places, seen.round.ghosts if seen.round is not None else ()), 0.0

    def _narrow(self, look: Looked, now: float) -> Turn:
        """Stop watching the nodes once enough more senior nodes have watched them for a while."""
        seen, mine = look.seen, look.create_revision
        ghosts = seen.round.ghosts if seen.round is not None else ()
        alive = [node for node in seen.nodes.values() if node.ghost not in ghosts]
        older = sum(node.create_revision < mine for node in alive)
        if not is_surplus_watcher(seen.round, older, len(alive)):
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
