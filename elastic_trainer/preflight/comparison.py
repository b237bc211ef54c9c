"""Compares a node with the others of its run: publishes its report, reads and judges theirs, checks connections.

Also asks etcd itself: whether each endpoint answers, its version, its latency.

*Runs in* the caller's thread. *Owns* nothing; a report stays in the store as long as its lease, which nobody renews.
*Fails by* the store's errors; then the other nodes' results are unknown. Unreadable reports are skipped.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import DocumentError, NodeRecord
from elastic_trainer.preflight.examination import MOST_ASKED, Neighbor, reaching
from elastic_trainer.preflight.judge import (
    Anchor,
    Finding,
    FitLimits,
    NodeReport,
    Published,
    Status,
    bad,
    clock_finding,
    judge,
    sentence,
)
from elastic_trainer.settings import Endpoint, StoreSettings
from elastic_trainer.store import connect_checked
from elastic_trainer.store.api import KeyValue, Order, Put, RunKeys, Store
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

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
        """Publish ``report`` for ``keep_s`` seconds."""
        lease = self._store.grant(keep_s, self._soon())
        put = Put(self._keys.preflight_node(report.node), report.encode(), lease.id)
        self._store.transact([], [put], deadline=self._soon())

    def findings(self, *, others: int, wait_s: float, keep_s: float) -> list[Finding]:
        """The findings, once the reports of ``others`` nodes are published or ``wait_s`` seconds are over."""
        mine, peers = self._reports(others, wait_s)
        found = [reaching("run.connect", self._neighbors(), self._soon())]
        last = self._anchor()
        if self._first is not None and last is not None:
            told = {peer.report.node: (peer.revision, peer.report.wall) for peer in peers}
            found.append(clock_finding(told, self._first, last, self._limits))
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
        limit, under = wanted + MOST_COMPARED, self._keys.preflight
        while not waiting.expired:
            items = self._store.range(under, self._soon(), limit=limit, keys_only=True).items
            if sum(not self._keys.is_preflight_meeting(item.key) for item in items) >= wanted:
                break
            pause(min(_LOOK_S, waiting.remaining_s()), clock=self._clock)
        reports = published(self._store, self._keys, self._soon())
        mine = self._store.get(self._keys.preflight_node(self._node), self._soon()).first
        peers = [each for each in reports if each.report.node != self._node]
        return _read(mine) if mine is not None else None, peers

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


# ---- etcd

ENDPOINT_S, ENDPOINT_SHARE = 4.0, 0.1
"""Time limit of one endpoint, in seconds, and as a share of the time for all checks; the longer one holds."""
_TRIES = 7


def endpoints(settings: StoreSettings, run: str | None, limits: FitLimits, deadline: Deadline) -> list[Finding]:
    """One finding for each endpoint. If some work, failures of others are only warnings."""
    limit_s = max(ENDPOINT_S, ENDPOINT_SHARE * deadline.remaining_s())
    found = [_endpoint(settings, each, run, limits, deadline.at_most(limit_s)) for each in settings.endpoints]
    if all(finding.status is Status.BAD for finding in found):
        return found
    return [each.but(Status.WARN, each.hint) if each.status is Status.BAD else each for each in found]


def _endpoint(
    settings: StoreSettings, endpoint: Endpoint, run: str | None, limits: FitLimits, deadline: Deadline
) -> Finding:
    name = "etcd" if len(settings.endpoints) == 1 else f"etcd {endpoint}"
    alone = settings.model_copy(update={"endpoints": (endpoint,)})
    try:
        store = connect_checked(alone, deadline, run=run)
    except ElasticTrainerError as error:
        return Finding.of_error(name, error)
    try:
        said = store.version(deadline)
    except ElasticTrainerError as error:
        return Finding(name, Status.WARN, f"{endpoint}: answers, but not with its version: {error.message}")
    finally:
        store.close()
    numbers = re.match(r"(\d+)\.(\d+)", said)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < limits.etcd_version:
        least = ".".join(map(str, limits.etcd_version))
        return Finding(name, Status.WARN, f"{endpoint}: etcd {said} is old", hint=f"use etcd {least} or newer")
    return Finding(name, Status.OK, f"{endpoint}: etcd {said}")


def round_trip(store: Store, key: str, limits: FitLimits, deadline: Deadline, clock: Clock = SYSTEM) -> Finding:
    """The median time of several linearizable reads. Raises the store's errors."""
    times = list[float]()
    for _ in range(_TRIES):
        begun = clock.monotonic()
        store.get(key, deadline)
        times.append(clock.monotonic() - begun)
    value_ms, limit_ms = median(times) * 1e3, limits.etcd_round_trip_s * 1e3
    found = Finding("etcd.round_trip", Status.OK, f"{value_ms:.3g} ms", value_ms, "ms", limit_ms)
    hint = "etcd is far away or has a slow disk: recoveries will take longer"
    return found.but(Status.WARN, hint) if value_ms > limit_ms else found


# ---- reports

COMPARED = ("matmul.", "memory.", "disk.write", "disk.read")
"""Name prefixes of findings whose values nodes compare: higher is better."""
MOST_COMPARED = 64
"""Upper bound on the reports that one node reads: a thousand nodes reading a thousand would be too much load."""


def report_of(
    node: str, address: str, findings: Iterable[Finding], versions: Mapping[str, str], wall: float
) -> NodeReport:
    """The report of these findings."""
    known = tuple(findings)
    values = {each.name: each.value for each in known if each.value is not None and each.name.startswith(COMPARED)}
    where: dict[str, Any] = {"node": node, "host": socket.gethostname(), "address": address, "wall": wall}
    return NodeReport(**where, fit=not bad(known), text=sentence(bad(known)), values=values, versions=dict(versions))


def published(store: Store, keys: RunKeys, deadline: Deadline) -> tuple[Published, ...]:
    """The reports of the run's oldest nodes: all nodes compare themselves with the same ones."""
    found = store.range(keys.preflight, deadline, limit=MOST_COMPARED, order=Order.CREATE_REVISION)
    reports = (_read(item) for item in found.items if not keys.is_preflight_meeting(item.key))
    return tuple(report for report in reports if report is not None)


def _read(item: KeyValue) -> Published | None:
    try:
        return Published(NodeReport.decode(item.value, item.key), item.create_revision, item.mod_revision)
    except DocumentError as error:
        logger().debug("report.unreadable", key=plain(item.key), error=str(error))
        return None
