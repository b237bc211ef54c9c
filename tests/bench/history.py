"""History: thirty days of a run with 2,000 incidents, made at speed: etcd's size, the page; and a crowd at the door.

Rounds and incidents are written into a real etcd by the functions of the agents, and read by the monitor's own reader.
The crowd is more slow connections than a server has places; each comes back as soon as it is cut.
"""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from prometheus_client import REGISTRY

from elastic_trainer.agent.health.health_store import INCIDENTS_KEPT, HealthStore
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.composition import broken
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.health import Incident
from elastic_trainer.membership.round_write import Author, round_write
from elastic_trainer.model import Cause
from elastic_trainer.monitor import page
from elastic_trainer.monitor.model.contents import RunDocuments
from elastic_trainer.monitor.model.curves import LIMIT as MOST_POINTS
from elastic_trainer.monitor.model.observation import Observer
from elastic_trainer.monitor.model.snapshot import as_values, snapshot
from elastic_trainer.monitor.read.feed import RunFeed
from elastic_trainer.monitor.serve.service import Monitor, MonitorOptions
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Store
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.web.node import EndpointOptions, NodeEndpoint
from tests.bench.health_store import LIMIT_S, SimulatedRun, name
from tests.bench.report import Must, Options, Report, at_least, at_most, at_most_time, emit, median, note, parse
from tests.support.crowd import crowding

RUN, NODES, DAYS = "long", 8, 30
INCIDENTS, QUICK_INCIDENTS = 2000, 100
LOOK_EVERY_S = 300.0
ETCD_LIMIT_MB, PAGE_LIMIT_MS, PROBE_LIMIT_S = 50.0, 100.0, 1.0
CROWD, PROBES, QUICK_PROBES = 300, 200, 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse("history", __doc__, argv, repeats=9, quick_repeats=3)
    count = QUICK_INCIDENTS if options.quick else INCIDENTS
    with EtcdServer(arguments=("--unsafe-no-fsync",)) as etcd:
        with SimulatedRun(etcd.endpoint, RUN, NODES):
            pass  # its keys stay
        store = connect(StoreSettings(endpoints=parse_endpoints(etcd.endpoint)))
        try:
            figures, musts = _history(etcd, store, count, options)
            crowd, more = _crowd(store, QUICK_PROBES if options.quick else PROBES)
        finally:
            store.close()
    return emit(Report(options, figures={"incidents": count, **figures, **crowd}, musts=[*musts, *more]))


def _history(etcd: EtcdServer, store: Store, count: int, options: Options) -> tuple[dict[str, Any], list[Must]]:
    keys = RunKeys(str(StoreSettings.model_fields["prefix"].default), RUN)
    note(f"{count} incidents are written")
    _write(store, keys, count)
    written_mb = _size_mb(etcd, "dbSize")
    revision = store.range(keys.root, Deadline.after(LIMIT_S), limit=1).revision
    etcd.call("kv/compaction", revision=revision, physical=True)
    kept_mb = _size_mb(etcd, "dbSizeInUse")
    kept = store.range(keys.incidents, Deadline.after(LIMIT_S), keys_only=True).items
    note(f"the monitor looks at {DAYS} days")
    documents = RunFeed(store, keys).read(Deadline.after(LIMIT_S))
    observer = _observed(documents)
    updates = []
    for number in range(options.repeats):
        now = DAYS * 86400.0 + number
        began = SYSTEM.monotonic()
        shown = as_values(snapshot(documents, observer.look(documents, now, now)))
        page.run_update(shown)
        updates.append(1000 * (SYSTEM.monotonic() - began))
    points = len(shown["curves"]["wall"])
    figures = {
        "etcd_written_mb": written_mb,
        "etcd_mb": kept_mb,
        "incidents_kept": len(kept),
        "page_ms": median(updates),
    }
    return {**figures, "points": points}, [
        at_most("etcd, the run after compaction, MB", kept_mb, ETCD_LIMIT_MB),
        at_most("incidents kept", len(kept), INCIDENTS_KEPT + 1),  # and the open one
        at_most(f"points of the curves of {DAYS} days", points, MOST_POINTS),
        at_most_time("page: an update, ms", median(updates), PAGE_LIMIT_MS),
    ]


def _write(store: Store, keys: RunKeys, count: int) -> None:
    """Rounds that a lost node ends, over the days; each has the record that its agents write."""
    every_s = DAYS * 86400.0 / count
    items = store.range(keys.nodes, Deadline.after(LIMIT_S), keys_only=True).items
    members = tuple(RoundMember(name(n), item.create_revision, 1, 8 * n, 8) for n, item in enumerate(items))
    author = Author(keys, name(0), items[0].create_revision)
    health = HealthStore(store, keys, name(0))
    (current,) = store.get(keys.round, Deadline.after(LIMIT_S)).items
    revision, began = current.mod_revision, SYSTEM.wall() - DAYS * 86400.0
    for number in range(1000, 1000 + count):
        wall = began + (number - 1000) * every_s
        active = RoundDocument(
            number=number, nonce=f"n{number}", state=RoundState.ACTIVE, members=members, reason="all"
        )
        ended = broken(active, f"node {name(3)} is gone", cause=Cause.NODE_LOST, lost=(name(3),))
        for document in (active, ended):
            write = round_write(author, document, revision, wall)
            assert write is not None
            done = store.transact(write.guards, write.success, deadline=Deadline.after(LIMIT_S))
            assert done.succeeded
            revision = done.revision
        health.write_incident(_incident(number, wall))


def _incident(number: int, wall: float) -> Incident:
    return Incident(
        wall=wall, by=name(0), cause=Cause.NODE_LOST, round=number, next_round=number + 1, reason="a node is gone",
        nodes=(name(3),), ranks=tuple(range(24, 32)), world_before=64, world_after=56, regroup_s=0.1, resume_s=0.2,
    )  # fmt: skip


def _observed(documents: RunDocuments) -> Observer:
    observer = Observer()
    for number in range(int(DAYS * 86400.0 / LOOK_EVERY_S)):
        observer.look(documents, number * LOOK_EVERY_S, number * LOOK_EVERY_S)
    return observer


def _size_mb(etcd: EtcdServer, field: str) -> float:
    return int(etcd.call("maintenance/status")[field]) / 1e6


def _crowd(store: Store, probes: int) -> tuple[dict[str, Any], list[Must]]:
    """What a probe gets and how long it takes while the crowd presses on the monitor, and on a node's endpoint."""
    prefix = str(StoreSettings.model_fields["prefix"].default)
    node = EndpointOptions("127.0.0.1", 0, None, None, None)
    figures: dict[str, Any] = {}
    musts: list[Must] = []
    with Monitor(store, MonitorOptions(prefix, port=0)) as monitor, closing(NodeEndpoint(node, REGISTRY)) as endpoint:
        for who, port in (("monitor", monitor.port), ("node", endpoint.port)):
            note(f"{CROWD} connections press on the {who}")
            with crowding(port, CROWD) as crowd:
                answered, seconds = zip(*(_probed(port) for _ in range(probes)), strict=True)
                returned = crowd.returned
            slowest = {"probe_slowest_s": max(seconds), "probe_median_s": median(seconds)}
            figures[who] = {**slowest, "cut_and_returned": returned}
            musts += [
                at_least(f"{who}: probes answered, %", 100.0 * sum(answered) / probes, 100.0),
                at_most_time(f"{who}: slowest probe, s", max(seconds), PROBE_LIMIT_S),
            ]
    return figures, musts


def _probed(port: int) -> tuple[bool, float]:
    """Whether a probe was answered, and after how many seconds."""
    answered, began = False, SYSTEM.monotonic()
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        asking.request("GET", "/healthz")
        answered = asking.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        pass
    finally:
        asking.close()
    return answered, SYSTEM.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
