"""Capacity: what nodes cost etcd in keys, bytes, requests and memory, and what 10 to 10,000 of them need.

The nodes are real members (capacity_nodes), each with a connection, lease, key and watch, without workers, all on this
machine; what their agents would tell of 8 ranks each is written beside them. Bytes, keys and requests are counted, by
etcd itself, so that a busy machine changes nothing; memory is etcd's own. How soon all agree after the last has joined
is an upper bound, since they share the machine's cores. The plan for more nodes is computed (capacity_plan).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Put, RunKeys, Store
from elastic_trainer.telemetry.families import FAMILIES
from tests.bench.capacity_nodes import LOCAL_WORLD_SIZE
from tests.bench.capacity_plan import NODES, Costs, costs, need
from tests.bench.health import _series_of_node
from tests.bench.health_store import health
from tests.bench.report import Options, Report, at_most, at_most_time, emit, note, parse

ROOT = Path(__file__).parents[2]
SIZES, QUICK_SIZES = (10, 100, 1000), (4, 12)
NODES_PER_PROCESS = 128
LAST_CALL_S = 120.0
"""The first round is that of all nodes, however long this machine takes to start them."""
WRITES_PER_NODE, LEAST_WRITES, QUICK_WRITES = 4, 1000, 100
SETTLE_S = 0.5
"""etcd brings what was written into its database ten times a second."""
IDLE_S, QUICK_IDLE_S = 20.0, 3.0
LIMIT_S = 300.0
TTL_S, QUICK_TTL_S = 30.0, 6.0
SERIES_OF_MONITOR = 134.0
QUOTA_MIB = 8192.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("capacity", __doc__, argv, repeats=1)
    sizes = QUICK_SIZES if options.quick else SIZES
    measured = {size: measure(size, options) for size in sizes}
    cost = costs(fitted(measured))
    plan = {str(nodes): asdict(need(nodes, cost)) for nodes in NODES}
    database = need(1000, cost).database / (1 << 20)
    musts = [
        at_most("database of 1,000 nodes with compaction, MiB", database, QUOTA_MIB),
        at_most_time(
            f"{max(sizes)} nodes join: last join to agreement, s", measured[max(sizes)]["join_to_agreement_s"], 2.0
        ),
    ]
    figures = {"measured": {str(size): each for size, each in measured.items()}, "costs": asdict(cost), "plan": plan}
    return emit(Report(options, figures=figures, musts=musts))


def fitted(measured: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Per-node costs of the largest size; what all sizes share is told apart by the difference of two.

    The round of the largest is compressed, that of the others is not.
    """
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


class Hosts:
    """The processes with the nodes in them."""

    def __init__(self, count: int, job: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.bench.capacity_nodes"]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
        ]
        for process in self._processes:
            self._send(process, job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def ask(self, do: str, nodes: Sequence[str] = (), **more: Any) -> list[dict[str, Any]]:
        """Give a command to all processes, each with its share of ``nodes``; their answers."""
        for index, process in enumerate(self._processes):
            mine = [name for name in nodes if int(name[1:]) % len(self._processes) == index]
            self._send(process, {"do": do, "nodes": mine, **more})
        return [self._answer(process) for process in self._processes]

    @staticmethod
    def _send(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"a process of simulated nodes ended with {process.wait()}")
        return dict(json.loads(line))


def measure(size: int, options: Options) -> dict[str, float]:
    """All figures of ``size`` nodes on an etcd of their own."""
    with EtcdServer() as server:
        job = {
            "endpoint": server.endpoint,
            "run": "capacity",
            "min_nodes": 1,
            "max_nodes": size,
            "ttl_s": QUICK_TTL_S if options.quick else TTL_S,
            "last_call_s": LAST_CALL_S,
        }
        store = connect(StoreSettings(endpoints=parse_endpoints(server.endpoint)))
        try:
            with Hosts(max(1, size // NODES_PER_PROCESS), job) as hosts:
                return Scene(server, store, hosts, size, options.quick).play()
        finally:
            store.close()


class Scene:
    """One etcd with ``size`` nodes, phase by phase."""

    def __init__(self, server: EtcdServer, store: Store, hosts: Hosts, size: int, quick: bool) -> None:
        self._server, self._store, self._hosts, self._size, self._quick = server, store, hosts, size, quick
        self._keys = RunKeys("/bench", "capacity")
        self._names = [f"n{number:04d}" for number in range(size)]
        self._feed = RunFeed(store, self._keys)

    def play(self) -> dict[str, float]:
        found = self._joined() | self._idle() | self._written()
        found |= self._at_rest()
        return found | self._changed()

    def _joined(self) -> dict[str, float]:
        note(f"{self._size} nodes join")
        self._hosts.ask("connect", self._names)
        before = self._counted()
        self._hosts.ask("begin", self._names)
        agreed_s = self._agreed(self._names, after=0)
        spent = self._since(before)
        return {
            "join_to_agreement_s": agreed_s,
            "join_requests": (spent["requests"] - spent["keep_alives"]) / self._size,
        }

    def _agreed(self, names: Sequence[str], after: int) -> float:
        """Seconds from the last join until all take part in one round later than ``after``, with ranks in a row."""
        told = [each for answer in self._hosts.ask("await", size=len(names), after=after) for each in answer["nodes"]]
        errors = [each["error"] for each in told if each["error"]]
        rounds = {(each["round"], each["nonce"], each["store"], each["nodes"]) for each in told}
        ranks = sorted(int(each["first_rank"]) for each in told if each["first_rank"] is not None)
        if errors or len(rounds) != 1 or ranks != [LOCAL_WORLD_SIZE * place for place in range(len(names))]:
            raise RuntimeError(f"{len(names)} nodes did not agree in time: {len(rounds)} rounds, errors: {errors[:1]}")
        return float(max(each["agreed_at"] for each in told) - max(each["joined_at"] for each in told))

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
        self._feed.read(Deadline.after(LIMIT_S))
        pause(SETTLE_S)
        before = self._counted()
        times = max(WRITES_PER_NODE, (QUICK_WRITES if self._quick else LEAST_WRITES) // self._size)
        for step in range(2, 2 + times):
            self._tell_health(step)
        pause(SETTLE_S)
        spent, writes = self._since(before), float(times * self._size)
        before = self._counted()
        self._feed.read(Deadline.after(LIMIT_S))
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
            put = Put(self._keys.node_health(name), health(number, step).encode())
            self._store.transact([], [put], deadline=Deadline.after(LIMIT_S))

    def _at_rest(self) -> dict[str, float]:
        """What is stored, and how large the database is once old versions are forgotten."""
        found = self._store.range(self._keys.root, Deadline.after(LIMIT_S))
        grown = self._counted()["database"]
        self._server.call("kv/compaction", revision=found.revision, physical=True)
        self._server.call("maintenance/defragment")
        document = next(item for item in found.items if item.key == self._keys.round)
        entry = next(item for item in found.items if item.key.startswith(self._keys.events))
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
        self._hosts.ask("leave", self._names[-1:])
        self._agreed(self._names[:-1], after=1)
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


if __name__ == "__main__":
    sys.exit(main())
