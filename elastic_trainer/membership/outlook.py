"""Keeps a node's view as wide as its seniority asks: the nodes with the round, or the round alone.

*Runs in* the deciding thread; ``roll_call`` in any.
*Owns* what the view follows.
*Fails by* TransientError when the store does not answer: the caller tries again.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.membership.leader_priority import STRAYS, first_names, is_one_too_many, plan, written_by_nodes
from elastic_trainer.membership.presence import Presence
from elastic_trainer.membership.view import Observation, RunView
from elastic_trainer.store.api import Order, Read, Store, prefix_end
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.telemetry.logs import logger

ASK_LIMIT_S = 2.0
LEASE_SLACK_S = 1.0
"""How much later than its time a lease may end (etcd looks twice a second)."""
JITTER = 0.25
NAMED = 32
"""So many nodes are named in a message."""
CALLED = 64
"""So many members are asked for; if none of them is there, the round is taken for dead."""


@dataclass(frozen=True, slots=True)
class RollCall:
    """Who is there, for people, and whether members of the round are."""

    present: str
    round_lives: bool


class Outlook:
    """See the module. ``patience_s``: after so long without news the most senior nodes are taken for dead."""

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        presence: Presence,
        view: RunView,
        clock: Clock = SYSTEM,
        patience_s: float | None = None,
    ) -> None:
        self._store, self._keys, self._presence, self._view, self._clock = store, keys, presence, view, clock
        self._patience_s = patience_s if patience_s is not None else presence.ttl_s + LEASE_SLACK_S
        self._news: tuple[int, int] = (-1, 0)
        self._quiet_since = 0.0
        self._asked = 0
        self._asked_at_s = 0.0
        self._spread = 1.0
        self._junior_since: float | None = None

    def turn(self, seen: Observation, now: float) -> float:
        """Widen or narrow the view if that is due; seconds until the next look if nothing changes."""
        self._view.tidy()
        mine = self._presence.create_revision
        if mine == 0 or self._view.changing:
            return math.inf
        if seen.follows_nodes:
            return self._narrow(seen, mine, now)
        return self._widen(seen, mine, now)

    def _widen(self, seen: Observation, mine: int, now: float) -> float:
        if self._news != (seen.round_revision, mine):
            shown_anew = self._news[1] != mine
            self._forget((seen.round_revision, mine), now)
            if shown_anew and self._presence.senior:
                return self._follow("it is among the most senior")
        due = plan(seen.round, self._presence.node_id, mine, self._asked, self._asked_at_s, self._patience_s)
        left = due.after_s * self._spread - (now - self._quiet_since)
        if left > 0.0:
            return left
        if due.places is None:
            return self._follow("the round is over and nothing happens")
        if self._presence.node_id in self._oldest(seen.round, due.places):
            return self._follow(f"it is among the {due.places} most senior")
        self._asked += 1
        self._asked_at_s = (now - self._quiet_since) / self._spread
        return 0.0

    def _narrow(self, seen: Observation, mine: int, now: float) -> float:
        """Leave the nodes to more senior ones, when that has been possible for a while."""
        ghosts = {(ghost.node, ghost.mod_revision) for ghost in seen.round.ghosts} if seen.round is not None else set()
        alive = [node for node in seen.nodes.values() if (node.id, node.mod_revision) not in ghosts]
        older = sum(node.create_revision < mine for node in alive)
        if not is_one_too_many(seen.round, older, len(alive)):
            self._junior_since = None
            return math.inf
        if self._junior_since is None:
            self._junior_since = now
        left = self._junior_since + self._patience_s * self._spread - now
        if left > 0.0:
            return left
        logger().debug("nodes.left_to_others", older=older)
        self._junior_since = None
        self._forget((seen.round_revision, mine), now)
        self._view.change(self._store, nodes=False)
        return math.inf

    def _follow(self, reason: str) -> float:
        logger().debug("nodes.followed", reason=reason)
        self._view.change(self._store, nodes=True)
        return math.inf

    def _forget(self, news: tuple[int, int], now: float) -> None:
        self._news, self._quiet_since, self._asked, self._asked_at_s = news, now, 0, 0.0
        self._spread = random.uniform(1.0, 1.0 + JITTER)  # a thousand nodes need not ask at once

    def _oldest(self, document: RoundDocument | None, places: int) -> list[str]:
        ghosts = document.ghosts if document is not None else ()
        found = self._store.range(
            self._keys.nodes,
            Deadline.after(ASK_LIMIT_S, self._clock),
            limit=places + len(ghosts) + STRAYS,
            order=Order.CREATE_REVISION,
            keys_only=True,
        )
        return first_names(written_by_nodes(found.items, self._keys), ghosts, places)

    # ---- for a node that gives up

    def roll_call(self, seen: Observation) -> RollCall:
        """Ask the store who is there, for a node that does not follow the nodes. Never raises."""
        everyone = Read(self._keys.nodes, prefix_end(self._keys.nodes), limit=NAMED + 1 + STRAYS, keys_only=True)
        members = seen.round.members[:CALLED] if seen.round is not None else ()
        reads = [Read(self._keys.node(member.node), keys_only=True) for member in members]
        try:
            found = self._store.transact([], [everyone, *reads], deadline=Deadline.after(ASK_LIMIT_S, self._clock))
        except ElasticTrainerError as error:
            return RollCall(f"not known: {error}", round_lives=False)
        names = [name for name, _ in written_by_nodes(found.reads[0].items, self._keys)]
        keys = [read.first for read in found.reads[1:]]
        lives = any(
            key is not None and key.create_revision == member.create_revision
            for key, member in zip(keys, members, strict=True)
        )
        return RollCall(named(names), lives)


def named(names: list[str]) -> str:
    """The first of ``names``, in words."""
    if not names:
        return "none"
    return ", ".join(names[:NAMED]) + (" and others" if len(names) > NAMED else "")
