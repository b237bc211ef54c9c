"""What a service of so many nodes needs, computed from what a node was measured to cost. Pure.

The figures that ``deploy/capacity.md`` shows are those of ``deploy/capacity.json``, which ``python -m
tests.bench.capacity`` has measured; a test computes the page's table anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from elastic_trainer.agent.health.node_health import LEAST_INTERVAL_S, NODES_PER_SECOND
from elastic_trainer.membership.documents import COMPRESS_FROM
from elastic_trainer.membership.writes import JOURNAL_LENGTH
from elastic_trainer.settings import RendezvousOptions
from elastic_trainer.store.session import REFRESHES_PER_TTL

NODES = (10, 100, 1_000, 10_000)
RANKS = 8
HOURS_KEPT = 2.0
"""etcd compacts once an hour what is older than an hour: so much history lies in the database at most."""
MEBI, KIBI = 1 << 20, 1 << 10
SERIES_BYTES = 8 * KIBI
"""An assumption, not measured: memory that Prometheus takes for one series that is being written."""
SCRAPE_S = 15.0
REQUEST_LIMIT = 1.5 * MEBI
"""etcd refuses larger requests unless told otherwise (``--max-request-bytes``)."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one node, one write or one change costs: bytes, unless the name says otherwise."""

    stored_per_node: float
    """Keys and values of a node: presence, health, its places in the round and in one journal entry."""
    keys_per_node: float
    keys_per_run: float
    health_request: float
    """A health document on the wire."""
    health_sent: float
    """What etcd sends for it: an answer, and the document to the three nodes that follow the others."""
    database_per_write: float
    """What a health document adds to the database."""
    disk_per_write: float
    """What etcd writes to its disk for it, log and database."""
    fsyncs_per_write: float
    keep_alive_received: float
    keep_alive_sent: float
    monitor_read_per_node: float
    """What etcd sends a monitor for a node that has written since the last look."""
    round_per_node: float
    """A node's place in the round document, where that is compressed."""
    plain_round_per_node: float
    journal_per_node: float
    """A node's name in a journal entry."""
    join_requests: float
    """Requests of a node until it takes part, keep-alives apart."""
    change_sent_per_pair: float
    """What a change of the round sends, for each node and each place in it, where the document is compressed."""
    plain_change_sent_per_pair: float
    memory_base: float
    memory_per_node: float
    series_per_node: float
    series_of_monitor: float


def costs(figures: Mapping[str, Any]) -> Costs:
    return Costs(**{field.name: float(figures[field.name]) for field in fields(Costs)})


@dataclass(frozen=True, slots=True)
class Need:
    """What a run of ``nodes`` nodes with 8 ranks each needs. Rates are per second."""

    nodes: int
    health_writes: float
    keep_alives: float
    received: float
    sent: float
    disk: float
    fsyncs: float
    growth_per_hour: float
    database: float
    memory: float
    journal: float
    round_document: float
    change_sent: float
    series: float
    prometheus_memory: float
    samples: float


def need(nodes: int, cost: Costs, monitors: int = 1) -> Need:
    every_s = max(LEAST_INTERVAL_S, nodes / NODES_PER_SECOND)
    writes = nodes / every_s + 1.0  # and the progress of the run, each second
    keep_alives = nodes * REFRESHES_PER_TTL / RendezvousOptions().ttl
    growth = writes * cost.database_per_write * 3600.0
    journal = nodes * cost.journal_per_node * JOURNAL_LENGTH
    series = nodes * cost.series_per_node + cost.series_of_monitor
    plain = nodes * cost.plain_round_per_node
    compressed = plain >= COMPRESS_FROM
    return Need(
        nodes=nodes,
        health_writes=writes,
        keep_alives=keep_alives,
        received=writes * cost.health_request + keep_alives * cost.keep_alive_received,
        sent=writes * (cost.health_sent + monitors * cost.monitor_read_per_node) + keep_alives * cost.keep_alive_sent,
        disk=writes * cost.disk_per_write,
        fsyncs=writes * cost.fsyncs_per_write,
        growth_per_hour=growth,
        database=nodes * cost.stored_per_node + journal + HOURS_KEPT * growth,
        memory=cost.memory_base + nodes * cost.memory_per_node + journal + HOURS_KEPT * growth,
        journal=journal,
        round_document=nodes * cost.round_per_node if compressed else plain,
        change_sent=nodes**2 * (cost.change_sent_per_pair if compressed else cost.plain_change_sent_per_pair),
        series=series,
        prometheus_memory=series * SERIES_BYTES,
        samples=series / SCRAPE_S,
    )


ROWS: tuple[tuple[str, str, float], ...] = (
    ("health writes, 1/s", "health_writes", 1.0),
    ("keep-alives, 1/s", "keep_alives", 1.0),
    ("etcd receives, KiB/s", "received", KIBI),
    ("etcd sends, to nodes and one monitor, KiB/s", "sent", KIBI),
    ("etcd writes to disk, KiB/s", "disk", KIBI),
    ("fsyncs, 1/s", "fsyncs", 1.0),
    ("database grows in an hour, MiB", "growth_per_hour", MEBI),
    ("database with compaction after 1 h, at most, MiB", "database", MEBI),
    ("memory of etcd with all of it, MiB", "memory", MEBI),
    ("journal of 1,000 changes, MiB", "journal", MEBI),
    ("round document, KiB", "round_document", KIBI),
    ("etcd sends at a change of the round, MiB", "change_sent", MEBI),
    ("Prometheus: series", "series", 1.0),
    ("Prometheus: samples, 1/s", "samples", 1.0),
    ("Prometheus: memory, MiB", "prometheus_memory", MEBI),
)
"""What the table shows: words, field, and the unit's size."""


def table(cost: Costs, sizes: Sequence[int] = NODES) -> str:
    needs = [need(size, cost) for size in sizes]
    head = "| nodes, of 8 ranks each | " + " | ".join(f"{size:,}" for size in sizes) + " |"
    rule = "|---|" + "---:|" * len(sizes)
    rows = [
        f"| {words} | " + " | ".join(figure(getattr(each, name) / unit) for each in needs) + " |"
        for words, name, unit in ROWS
    ]
    return "\n".join([head, rule, *rows])


def figure(value: float) -> str:
    if value >= 100.0:
        digits = len(str(int(value))) - 2
        return f"{round(value, -digits):,.0f}"
    return f"{value:.0f}" if value >= 10.0 else f"{value:.2g}"
