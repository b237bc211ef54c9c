"""Compares a node with the others of its run: publishes its report, reads and judges theirs, checks connections.

*Runs in* the caller's thread. *Owns* nothing; the report stays in the store for ``keep_s`` seconds.
*Fails by* the store's errors; then the other nodes' results are unknown.
"""

from __future__ import annotations

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.preflight.clocks import Anchor, Dated, compared
from elastic_trainer.preflight.finding import Finding, bad, sentence
from elastic_trainer.preflight.judge import judge
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.preflight.network import MOST_ASKED, Neighbor, reaching
from elastic_trainer.preflight.report import NodeReport, Published, count, publish, published, report_in
from elastic_trainer.store.api import Order, RunKeys, Store

STORE_S = 5.0
"""Time limit of each request to the store."""
_LOOK_S = 0.5
_ENOUGH = 8
"""Upper bound on the reports that it waits for, enough for a median."""


class PeerComparison:
    """One node's comparison; create it before the checks, so that clocks can be compared over their duration."""

    def __init__(self, store: Store, keys: RunKeys, node: str, limits: FitLimits, clock: Clock = SYSTEM) -> None:
        self._store, self._keys, self._node, self._limits, self._clock = store, keys, node, limits, clock
        self._first = self._anchor()

    def publish(self, report: NodeReport, keep_s: float) -> None:
        publish(self._store, self._keys, report, keep_s, self._soon())

    def findings(self, *, others: int, wait_s: float, keep_s: float) -> list[Finding]:
        """The findings, once the reports of ``others`` nodes are published or ``wait_s`` seconds are over."""
        mine, peers = self._reports(others, wait_s)
        found = [reaching("run.connect", self._neighbors(), self._soon())]
        last = self._anchor()
        if self._first is not None and last is not None:
            dated = [Dated(peer.report.node, peer.revision, peer.report.wall) for peer in peers]
            found.append(compared(dated, self._first, last, self._limits))
        if mine is None:
            return found
        found += judge(mine, peers, self._limits)
        if mine.report.fit and bad(found):  # other nodes must not compare themselves with this one
            unfit = {"fit": False, "text": sentence(bad(found)), "wall": self._clock.wall()}
            self.publish(mine.report.model_copy(update=unfit), keep_s)
        return found

    def _reports(self, others: int, wait_s: float) -> tuple[Published | None, list[Published]]:
        waiting = Deadline.after(wait_s, self._clock)
        wanted = 1 + min(others, _ENOUGH)
        while count(self._store, self._keys, wanted, self._soon()) < wanted and not waiting.expired:
            pause(min(_LOOK_S, waiting.remaining_s()), clock=self._clock)
        reports = published(self._store, self._keys, self._soon())
        peers = [each for each in reports if each.report.node != self._node]
        return report_in(self._store, self._keys, self._node, self._soon()), peers

    def _neighbors(self) -> list[Neighbor]:
        """The nodes of the run and their agents' addresses."""
        neighbors = []
        oldest = self._store.range(self._keys.nodes, self._soon(), limit=MOST_ASKED, order=Order.CREATE_REVISION)
        for item in oldest.items:
            node = self._keys.node_id(item.key)
            try:
                record = NodeRecord.decode(item.value, item.key)
            except DocumentError:
                continue
            if node is not None and node != self._node and record.probe_port:
                neighbors.append(Neighbor(node, record.address, record.probe_port))
        return neighbors

    def _anchor(self) -> Anchor | None:
        before = self._clock.wall()
        try:
            revision = self._store.get(self._keys.round, self._soon()).revision
        except ElasticTrainerError:
            return None
        return Anchor(revision, before, self._clock.wall())

    def _soon(self) -> Deadline:
        return Deadline.after(STORE_S, self._clock)
