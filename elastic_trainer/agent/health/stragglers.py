"""Finds ranks that compute much longer than the others; asks their node to leave where another is ready.

Only the node of rank 0 judges, from what all nodes publish.

*Runs in* the agent: the thread ``health-writer``. *Fails by* ElasticTrainerError when the store is away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from elastic_trainer.agent.health.evictions import Evictions
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundState
from elastic_trainer.membership.health import Incident, NodeHealth
from elastic_trainer.membership.stragglers import find_stragglers
from elastic_trainer.telemetry.logs import logger

LOOKS_IN_A_ROW: Final = 3
"""A rank must be slow in this many looks: smoothed times need some steps, and a busy minute is not a broken machine."""
LOOK_EVERY_S: Final = 5.0
REPORTED_AGAIN_S: Final = 600.0


class StragglerWatch:
    """See the module. ``records()`` are those of all nodes; ``evicts``: whether slow nodes are to go."""

    def __init__(
        self,
        node: str,
        evictions: Evictions,
        records: Callable[[], Mapping[str, NodeRecord]],
        *,
        evicts: bool,
        clock: Clock = SYSTEM,
    ) -> None:
        self._node, self._evictions, self._records = node, evictions, records
        self._evicts, self._clock = evicts, clock
        self._looked_at = clock.monotonic()
        self._slow: Counter[int] = Counter()
        self._round = 0
        self._reported_at: dict[str, float] = {}

    def look(self, current: RoundDocument | None, published: Callable[[], Mapping[str, NodeHealth]]) -> Incident | None:
        """Judge, if a look is due and this node has rank 0; the incident to report, if any."""
        now = self._clock.monotonic()
        if current is None or current.state is not RoundState.ACTIVE or not current.is_first(self._node):
            self._slow.clear()
            return None
        if now - self._looked_at < LOOK_EVERY_S or current.world_size < 3:
            return None
        self._looked_at = now
        if current.number != self._round:
            self._round = current.number
            self._slow.clear()
            return None  # the figures may still be those of the round before
        return self._judge(current, published(), now)

    def _judge(self, current: RoundDocument, published: Mapping[str, NodeHealth], now: float) -> Incident | None:
        here = {
            name: health for name, health in published.items() if current.member(name) and health.round == self._round
        }
        found = find_stragglers({rank.rank: rank.compute_s for health in here.values() for rank in health.ranks})
        self._slow = Counter({rank: self._slow[rank] + 1 for rank in found.ranks})
        lasting = {rank for rank, looks in self._slow.items() if looks >= LOOKS_IN_A_ROW}
        nodes = sorted(name for name, health in here.items() if any(rank.rank in lasting for rank in health.ranks))
        if not lasting:
            return None
        asked = self._evict(current, nodes, found.reason) if self._evicts else False
        fresh = [name for name in nodes if now - self._reported_at.get(name, -REPORTED_AGAIN_S) >= REPORTED_AGAIN_S]
        if not fresh and not asked:
            return None
        self._reported_at |= dict.fromkeys(nodes, now)
        logger().warning("ranks.slow", ranks=sorted(lasting), nodes=nodes, reason=found.reason)
        return Incident(
            wall=self._clock.wall(),
            by=self._node,
            kind="straggler",
            round=current.number,
            reason=found.reason + ("; its node was asked to leave, since another is ready" if asked else ""),
            nodes=tuple(nodes),
            ranks=tuple(sorted(lasting)),
            world_before=current.world_size,
            world_after=current.world_size,
        )

    def _evict(self, current: RoundDocument, nodes: list[str], reason: str) -> bool:
        """Ask one slow node to leave, if another is ready; never this one, which hosts the rendezvous store."""
        records = self._records()
        ready = [name for name, each in records.items() if each.state is NodeState.READY and not current.member(name)]
        victims = [name for name in nodes if name != self._node and current.member(name) is not None]
        if not ready or not victims:
            return False
        self._slow.clear()
        return self._evictions.ask(current, victims[0], reason)
