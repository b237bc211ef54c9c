"""Finds ranks that compute much longer than the others; asks their node to leave where another is ready.

Only the node of rank 0 judges, from what all nodes publish. It asks a node to leave through a key of that node, which
then leaves as after a SIGTERM: by a planned change, with exit code 143.

*Runs in* the agent: the thread ``health-writer``. *Fails by* ElasticTrainerError when the store is away.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundState
from elastic_trainer.membership.health import Incident, NodeHealth
from elastic_trainer.membership.stragglers import find_stragglers
from elastic_trainer.store.api import Delete, Put, Store, created_at, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

LOOKS_IN_A_ROW: Final = 3
"""A rank must be slow in this many looks: smoothed times need some steps, and a busy minute is no broken machine."""
LOOK_EVERY_S: Final = 5.0
REPORTED_AGAIN_S: Final = 600.0
_LIMIT_S: Final = 3.0


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class StragglerWatch:
    """See the module. ``records()`` are those of all nodes; ``evicts``: whether slow nodes are to go."""

    def __init__(
        self,
        node: str,
        store: Store,
        keys: RunKeys,
        records: Callable[[], Mapping[str, NodeRecord]],
        *,
        evicts: bool,
        clock: Clock = SYSTEM,
        leave: Callable[[], None] = _leave,
    ) -> None:
        self._node, self._store, self._keys, self._records = node, store, keys, records
        self._evicts, self._clock, self._leave = evicts, clock, leave
        self._looked_at = clock.monotonic()
        self._slow: Counter[int] = Counter()
        self._round = 0
        self._reported_at: dict[str, float] = {}
        self._obeyed = False

    def obey(self) -> None:
        """Leave, if this node was asked to. What the first look finds was asked of a node of this name before."""
        if not self._evicts:
            return
        asked = self._store.get(self._keys.eviction(self._node), Deadline.after(_LIMIT_S)).first
        first, self._obeyed = not self._obeyed, True
        if asked is None:
            return
        guard = unchanged(asked.key, asked.mod_revision)
        self._store.transact([guard], [Delete(asked.key)], deadline=Deadline.after(_LIMIT_S))
        if not first:
            logger().warning("node.evicted", node=self._node, reason=plain(asked.value.decode(errors="replace")))
            self._leave()

    def look(self, current: RoundDocument | None, published: Callable[[], Mapping[str, NodeHealth]]) -> Incident | None:
        """Judge, if it is time and this node's turn; what people should know."""
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
        victims = [member for name in nodes if name != self._node and (member := current.member(name)) is not None]
        if not ready or not victims:
            return False
        victim = victims[0]
        # A write that etcd does late must not send away who comes back under this name.
        guard = created_at(self._keys.node(victim.node), victim.create_revision)
        put = Put(self._keys.eviction(victim.node), reason.encode())
        self._slow.clear()
        return self._store.transact([guard], [put], deadline=Deadline.after(_LIMIT_S)).succeeded
