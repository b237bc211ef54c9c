"""Capacity: what nodes cost etcd in keys, bytes, requests and memory, and what 10 to 10,000 of them need.

The nodes are what agents have in restart mode (admission, lease, key, Member), each with a connection of its own, all
in this process; their workers alone are missing, and what their agents would tell of 8 ranks each is written beside
them. Bytes, keys and requests are counted, by etcd itself, so that a busy machine changes nothing; memory is etcd's
own. How soon all agree after the last has joined is an upper bound, since they share the machine's cores. The plan for
more nodes is computed.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

import structlog

from elastic_trainer.agent.health.node_health import LEAST_INTERVAL_S, NODES_PER_SECOND
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.admission import admit
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import COMPRESS_FROM, NodeRecord, NodeState, RoundDocument, RoundState, Spec
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.writes import JOURNAL_LENGTH
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.settings import RendezvousOptions, StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Put, RunKeys, Store
from elastic_trainer.store.session import REFRESHES_PER_TTL, LeaseSession
from elastic_trainer.telemetry.families import FAMILIES
from tests.bench import page
from tests.bench.health import _series_of_node
from tests.bench.health_store import RANKS, health
from tests.bench.report import Options, Report, at_most, at_most_time, emit, note, parse

KEYS = RunKeys("/bench", "capacity")
SIZES, QUICK_SIZES = (10, 100, 300), (4, 12)
"""The round of the largest is compressed, that of the others is not."""
LAST_CALL_S = 120.0
"""The first round is that of all nodes, however long this machine takes to start them."""
WRITES_PER_NODE, LEAST_WRITES, QUICK_WRITES = 4, 1000, 100
SETTLE_S = 0.5
"""etcd brings what was written into its database ten times a second."""
IDLE_S, QUICK_IDLE_S = 20.0, 3.0
LIMIT_S = 300.0
"""Nothing takes so long on a working machine."""
TTL_S, QUICK_TTL_S = 30.0, 6.0
STACK_BYTES, HANDS = 512 << 10, 64
SERIES_OF_MONITOR = 134.0
QUOTA_MIB = 8192.0


def soon() -> Deadline:
    return Deadline.after(LIMIT_S)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("capacity", __doc__, argv, repeats=1)
    threading.stack_size(STACK_BYTES)  # some six threads a node
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    decode = RoundDocument.decode
    RoundDocument.decode = lru_cache(4)(decode)  # type: ignore[method-assign]  # each real node has a core for it
    sizes = QUICK_SIZES if options.quick else SIZES
    measured = {size: measure(size, options) for size in sizes}
    cost = costs(fitted(measured))
    plan = {str(nodes): need(nodes, cost) for nodes in NODES}
    database = need(1000, cost)["database"] / (1 << 20)
    musts = [
        at_most("database of 1,000 nodes with compaction, MiB", database, QUOTA_MIB),
        at_most_time(
            f"{max(sizes)} nodes join: last join to agreement, s", measured[max(sizes)]["join_to_agreement_s"], 2.0
        ),
    ]
    figures = {"measured": {str(size): each for size, each in measured.items()}, "costs": asdict(cost), "plan": plan}
    return emit(Report(options, figures=figures, musts=musts))


def fitted(measured: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Per-node costs of the largest size; what all sizes share is told apart by the difference of two."""
    small, middle, large = min(measured), sorted(measured)[-2], max(measured)
    few, some, many = measured[small], measured[middle], measured[large]
    found = {name: value for name, value in many.items() if name in Costs.__dataclass_fields__}
    per_node = {name: (many[name] - few[name]) / (large - small) for name in ("keys", "stored", "memory")}
    found |= {
        "keys_per_node": per_node["keys"],
        "keys_per_run": few["keys"] - small * per_node["keys"],
        "stored_per_node": per_node["stored"],
        "memory_per_node": per_node["memory"],
        "memory_base": few["memory"] - small * per_node["memory"],
        "round_per_node": many["round"] / large,
        "plain_round_per_node": some["round"] / middle,
        "plain_change_sent_per_pair": some["change_sent_per_pair"],
        "series_per_node": float(sum(map(_series_of_node, FAMILIES))),
        "series_of_monitor": SERIES_OF_MONITOR,
    }
    return found


class SimulatedNode:
    """One node: connected at once, part of the run after :meth:`begin`."""

    def __init__(self, name: str, store: Store, size: int, ttl_s: float, changed: threading.Condition) -> None:
        self.name, self.store, self._size, self._ttl_s, self._changed = name, store, size, ttl_s, changed
        store.range("/bench/", soon(), limit=1)
        self.joined_at = self.agreed_at = 0.0
        self.agreed: RoundDocument | None = None
        self.error: str | None = None
        self._gone = False
        self._member: Member | None = None
        self._moved = threading.Event()

    def begin(self) -> None:
        """Join, and take part in every round from now on."""
        threading.Thread(target=self._run, name=f"node-{self.name}", daemon=True).start()

    def leave(self) -> None:
        """Go in an orderly way: the lease is revoked."""
        self._gone = True
        if self._member is not None:
            self._member.leave()
        self._moved.set()
        self.store.close()

    def _run(self) -> None:
        try:
            admit(self.store, KEYS, Spec(min_nodes=1, max_nodes=self._size), reopen=False, deadline=soon())
            session = LeaseSession(self.store, self._ttl_s, soon())
            limits = Limits(1, self._size, last_call_s=LAST_CALL_S, last_call_limit_s=LIMIT_S)
            member = self._member = Member(self.store, KEYS, self.name, session, limits, lambda error: None)
            member.on_round(self._hear)
            member.start(soon())
            while not self._gone:
                self._show(member)
                self._take_part(member, member.await_round(LIMIT_S))
        except ElasticTrainerError as error:
            if not self._gone:
                self.error = str(error)
                self._notify()

    def _hear(self, document: RoundDocument) -> None:
        if self.agreed is not None and is_over(self.agreed, document):
            self._moved.set()

    def _show(self, member: Member) -> None:
        free_for = self.agreed.number + 1 if self.agreed is not None else 0
        record = NodeRecord(
            host=f"host-{self.name}.example.com",
            address="127.0.0.1",
            local_world_size=RANKS,
            store_port=29500,
            probe_port=0,
            state=NodeState.READY,
            life=1 if self.agreed is None else member.record().life + 1,
            acknowledged=free_for,
            reported=free_for,
            planned=True,
        )
        member.announce(record, soon())
        self.joined_at = self.joined_at or SYSTEM.monotonic()

    def _take_part(self, member: Member, document: RoundDocument) -> None:
        """Work until the round is over."""
        self.agreed, self.agreed_at = document, SYSTEM.monotonic()
        self._notify()
        while not self._gone:
            self._moved.clear()
            newest = member.observation().round
            if newest is not None and is_over(document, newest):
                return
            self._moved.wait()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def is_over(mine: RoundDocument, seen: RoundDocument) -> bool:
    """The handler's ``round_is_over``; importing that would import torch."""
    over = seen.state in (RoundState.BROKEN, RoundState.DRAINING)
    return seen.number > mine.number or (seen.number == mine.number and over)


def measure(size: int, options: Options) -> dict[str, float]:
    """All figures of ``size`` nodes on an etcd of their own."""
    with EtcdServer() as server, Scene(server, size, options.quick) as scene:
        return scene.play()


class Scene:
    """One etcd with ``size`` nodes, phase by phase."""

    def __init__(self, server: EtcdServer, size: int, quick: bool) -> None:
        self._server, self._size, self._quick = server, size, quick
        self._settings = StoreSettings(endpoints=parse_endpoints(server.endpoint))
        self._store = connect(self._settings)
        self._feed = RunFeed(self._store, KEYS)
        self._names = [f"n{number:04d}" for number in range(size)]
        self._nodes: list[SimulatedNode] = []
        self._news = threading.Condition()
        self._hands = ThreadPoolExecutor(HANDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        list(self._hands.map(SimulatedNode.leave, self._nodes))
        self._hands.shutdown()
        self._store.close()

    def play(self) -> dict[str, float]:
        found = self._joined() | self._idle() | self._written()
        found |= self._at_rest()
        return found | self._changed()

    def _joined(self) -> dict[str, float]:
        note(f"{self._size} nodes join")
        ttl_s = QUICK_TTL_S if self._quick else TTL_S
        self._nodes = list(
            self._hands.map(
                lambda name: SimulatedNode(name, connect(self._settings), self._size, ttl_s, self._news), self._names
            )
        )
        before = self._counted()
        for node in self._nodes:
            node.begin()
        agreed_s = self._agreed(after=0)
        spent = self._since(before)
        return {
            "join_to_agreement_s": agreed_s,
            "join_requests": (spent["requests"] - spent["keep_alives"]) / self._size,
        }

    def _agreed(self, after: int) -> float:
        """Seconds from the last join until all take part in one round later than ``after``, with ranks in a row."""
        nodes, size = self._nodes, len(self._nodes)

        def together() -> bool:
            rounds = [node.agreed for node in nodes]
            there = all(each is not None and each.number > after and len(each.members) == size for each in rounds)
            return there or any(node.error for node in nodes)

        with self._news:
            self._news.wait_for(together, LIMIT_S)
        errors = [node.error for node in nodes if node.error]
        rounds = [node.agreed for node in nodes if node.agreed is not None]
        entries = [each.member(node.name) for each, node in zip(rounds, nodes, strict=False)]
        ranks = sorted(entry.first_rank for entry in entries if entry is not None)
        known = {(each.number, each.nonce, each.store, len(each.members)) for each in rounds}
        if errors or len(known) != 1 or ranks != [RANKS * place for place in range(size)]:
            raise RuntimeError(f"{size} nodes did not agree in time: {len(known)} rounds, errors: {errors[:1]}")
        return max(node.agreed_at for node in nodes) - max(node.joined_at for node in nodes)

    def _idle(self) -> dict[str, float]:
        note(f"{self._size} nodes keep their leases")
        before = self._counted()
        pause(QUICK_IDLE_S if self._quick else IDLE_S)
        spent = self._since(before)
        count = max(1.0, spent["keep_alives"])
        return {"keep_alive_received": spent["received"] / count, "keep_alive_sent": spent["sent"] / count}

    def _written(self) -> dict[str, float]:
        """Every node tells of its ranks, each in a request of its own; the monitor reads them once."""
        note(f"{self._size} nodes tell of their ranks")
        self._tell_health(1)
        self._feed.read(soon())
        pause(SETTLE_S)
        before = self._counted()
        times = max(WRITES_PER_NODE, (QUICK_WRITES if self._quick else LEAST_WRITES) // self._size)
        for step in range(2, 2 + times):
            self._tell_health(step)
        pause(SETTLE_S)
        spent, writes = self._since(before), float(times * self._size)
        before = self._counted()
        self._feed.read(soon())
        read = self._since(before)
        return {
            "health_request": spent["received"] / writes,
            "health_sent": spent["sent"] / writes,
            "database_per_write": spent["database"] / writes,
            "disk_per_write": spent["disk"] / writes,
            "fsyncs_per_write": spent["fsyncs"] / writes,
            "monitor_read_per_node": read["sent"] / self._size,
            "memory": self._counted()["memory"],
        }

    def _tell_health(self, step: int) -> None:
        for number, name in enumerate(self._names):
            put = Put(KEYS.node_health(name), health(number, step).encode())
            self._store.transact([], [put], deadline=soon())

    def _at_rest(self) -> dict[str, float]:
        """What is stored, and how large the database is once old versions are forgotten."""
        found = self._store.range(KEYS.root, soon())
        grown = self._counted()["database"]
        self._server.call("kv/compaction", revision=found.revision, physical=True)
        self._server.call("maintenance/defragment")
        document = next(item for item in found.items if item.key == KEYS.round)
        entry = next(item for item in found.items if item.key.startswith(KEYS.events))
        members = RoundDocument.decode(document.value, document.key).members
        return {
            "keys": float(len(found.items)),
            "stored": float(sum(len(item.key) + len(item.value) for item in found.items)),
            "round": float(len(document.value)),
            "journal_per_node": len(entry.value) / max(1, len(members)),
            "database_grown": grown,
            "database_compacted": self._counted()["database"],
        }

    def _changed(self) -> dict[str, float]:
        note(f"one of {self._size} nodes leaves")
        before = self._counted()
        self._nodes.pop().leave()
        self._agreed(after=1)
        spent = self._since(before)
        return {"change_sent_per_pair": spent["sent"] / self._size**2, "change_requests": spent["requests"]}

    def _counted(self) -> dict[str, float]:
        """What etcd has counted of itself, and what the system knows of its process."""
        with urlopen(f"http://{self._server.endpoint}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                family, _, labels = name.partition("{")
                sums[family] = sums.get(family, 0.0) + float(value)
                if "LeaseKeepAlive" in labels and family == "grpc_server_msg_received_total":
                    sums["keep_alives"] = float(value)
        process = Path(f"/proc/{self._server.pid}")
        written = next(line for line in (process / "io").read_text().splitlines() if line.startswith("wchar"))
        status = self._server.call("maintenance/status")
        return {
            "requests": sums["grpc_server_msg_received_total"],
            "keep_alives": sums.get("keep_alives", 0.0),
            "received": sums["etcd_network_client_grpc_received_bytes_total"],
            "sent": sums["etcd_network_client_grpc_sent_bytes_total"],
            "fsyncs": sums["etcd_disk_wal_fsync_duration_seconds_count"],
            "memory": sums["process_resident_memory_bytes"],
            "disk": float(written.split()[1]),
            "database": float(status["dbSizeInUse"] if "dbSizeInUse" in status else status["dbSize"]),
        }

    def _since(self, before: Mapping[str, float]) -> dict[str, float]:
        now = self._counted()
        return {name: now[name] - value for name, value in before.items()}


NODES = (10, 100, 1_000, 10_000)
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


def need(nodes: int, cost: Costs, monitors: int = 1) -> dict[str, float]:
    """What a run of ``nodes`` nodes with 8 ranks each needs: bytes, and rates per second."""
    every_s = max(LEAST_INTERVAL_S, nodes / NODES_PER_SECOND)
    writes = nodes / every_s + 1.0  # and the progress of the run, each second
    keep_alives = nodes * REFRESHES_PER_TTL / RendezvousOptions().ttl
    growth = writes * cost.database_per_write * 3600.0
    journal = nodes * cost.journal_per_node * JOURNAL_LENGTH
    series = nodes * cost.series_per_node + cost.series_of_monitor
    plain = nodes * cost.plain_round_per_node
    compressed = plain >= COMPRESS_FROM
    sent = writes * (cost.health_sent + monitors * cost.monitor_read_per_node) + keep_alives * cost.keep_alive_sent
    return {
        "nodes": nodes,
        "health_writes": writes,
        "keep_alives": keep_alives,
        "received": writes * cost.health_request + keep_alives * cost.keep_alive_received,
        "sent": sent,
        "disk": writes * cost.disk_per_write,
        "fsyncs": writes * cost.fsyncs_per_write,
        "growth_per_hour": growth,
        "database": nodes * cost.stored_per_node + journal + HOURS_KEPT * growth,
        "memory": cost.memory_base + nodes * cost.memory_per_node + journal + HOURS_KEPT * growth,
        "journal": journal,
        "round_document": nodes * cost.round_per_node if compressed else plain,
        "change_sent": nodes**2 * (cost.change_sent_per_pair if compressed else cost.plain_change_sent_per_pair),
        "series": series,
        "prometheus_memory": series * SERIES_BYTES,
        "samples": series / SCRAPE_S,
    }


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


def table(cost: Costs) -> str:
    """As deploy/capacity.md shows it."""
    needs = [need(size, cost) for size in NODES]
    rows = [(words, [figure(each[name] / unit) for each in needs]) for words, name, unit in ROWS]
    lines = page.table(["nodes, of 8 ranks each", *(f"{size:,}" for size in NODES)], rows).splitlines()
    lines[1] = "|---|" + "---:|" * len(NODES)
    return "\n".join(lines)


def figure(value: float) -> str:
    if value >= 100.0:
        digits = len(str(int(value))) - 2
        return f"{round(value, -digits):,.0f}"
    return f"{value:.0f}" if value >= 10.0 else f"{value:.2g}"


if __name__ == "__main__":
    sys.exit(main())
