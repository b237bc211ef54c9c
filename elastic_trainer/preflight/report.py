"""The report that a node publishes about its checks, for comparison with other nodes.

*Runs in* the caller's thread. *Owns* nothing; reports disappear when their leases expire, which are not renewed.
*Fails by* the store's errors; unreadable reports are skipped.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import Document, DocumentError
from elastic_trainer.preflight.finding import Finding, bad, sentence
from elastic_trainer.store.api import KeyValue, Order, Put, RunKeys, Store
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

COMPARED = ("matmul.", "memory.", "disk.write", "disk.read")
"""Name prefixes of findings whose values nodes compare: higher is better."""
MOST_COMPARED = 64
"""Upper bound on the reports that one node reads: a thousand nodes reading a thousand would be too much load."""


class NodeReport(Document):
    """The checks of one node."""

    node: str
    host: str = ""
    address: str = ""
    wall: float
    """When it was written (Unix time of that node)."""
    fit: bool = True
    """Whether others should compare themselves with it."""
    text: str = ""
    """The bad findings, for people."""
    values: Mapping[str, float] = Field(default_factory=dict)
    """Values by the names of their findings, in their units."""
    versions: Mapping[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """A report in the store."""

    report: NodeReport
    created: int
    """The create-revision of its key, which orders nodes by age."""
    revision: int


def report_of(
    node: str, address: str, findings: Iterable[Finding], versions: Mapping[str, str], wall: float
) -> NodeReport:
    """The report of these findings."""
    known = tuple(findings)
    return NodeReport(
        node=node,
        host=socket.gethostname(),
        address=address,
        wall=wall,
        fit=not bad(known),
        text=sentence(bad(known)),
        values={each.name: each.value for each in known if each.value is not None and each.name.startswith(COMPARED)},
        versions=dict(versions),
    )


def publish(store: Store, keys: RunKeys, report: NodeReport, keep_s: float, deadline: Deadline) -> None:
    """Publish ``report`` for ``keep_s`` seconds."""
    lease = store.grant(keep_s, deadline)
    store.transact([], [Put(keys.preflight_node(report.node), report.encode(), lease.id)], deadline=deadline)


def published(store: Store, keys: RunKeys, deadline: Deadline) -> tuple[Published, ...]:
    """The reports of the run's oldest nodes: all nodes compare themselves with the same ones."""
    found = store.range(keys.preflight, deadline, limit=MOST_COMPARED, order=Order.CREATE_REVISION)
    reports = (_read(item) for item in found.items if not keys.is_preflight_meeting(item.key))
    return tuple(report for report in reports if report is not None)


def report_in(store: Store, keys: RunKeys, node: str, deadline: Deadline) -> Published | None:
    """The report of ``node``."""
    item = store.get(keys.preflight_node(node), deadline).first
    return _read(item) if item is not None else None


def count(store: Store, keys: RunKeys, most: int, deadline: Deadline) -> int:
    """The number of reports, up to ``most``."""
    items = store.range(keys.preflight, deadline, limit=most + MOST_COMPARED, keys_only=True).items
    return min(most, sum(not keys.is_preflight_meeting(item.key) for item in items))


def _read(item: KeyValue) -> Published | None:
    try:
        return Published(NodeReport.decode(item.value, item.key), item.create_revision, item.mod_revision)
    except DocumentError as error:
        logger().debug("report.unreadable", key=plain(item.key), error=str(error))
        return None
