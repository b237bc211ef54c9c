"""History: thirty days of a run with 2,000 incidents, made at speed: etcd's size and the page.

Rounds and incidents are written into a real etcd by the functions of the agents, and read by the monitor's own reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_trainer.agent.health.node_health import INCIDENTS_KEPT, HealthStore
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.documents import Incident, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.rules import broken
from elastic_trainer.membership.writes import Author, round_write
from elastic_trainer.model import Cause
from elastic_trainer.monitor import page
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.monitor.snapshot import as_values, snapshot
from elastic_trainer.monitor.state import LIMIT as MOST_POINTS
from elastic_trainer.monitor.state import Observer, RunDocuments
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import RunKeys, Store
from tests.bench.health_store import LIMIT_S, SimulatedRun, name
from tests.bench.report import Must, Options, Report, at_most, at_most_time, emit, median, note, parse

RUN, NODES, DAYS = "long", 8, 30
INCIDENTS, QUICK_INCIDENTS = 2000, 100
LOOK_EVERY_S = 300.0
ETCD_LIMIT_MB, PAGE_LIMIT_MS = 50.0, 100.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("history", __doc__, argv, repeats=9, quick_repeats=3)
    count = QUICK_INCIDENTS if options.quick else INCIDENTS
    with EtcdServer(arguments=("--unsafe-no-fsync",)) as etcd:
        with SimulatedRun(etcd.endpoint, RUN, NODES):
            pass  # its keys stay
        store = connect(StoreSettings(endpoints=parse_endpoints(etcd.endpoint)))
        try:
            figures, musts = _history(etcd, store, count, options)
        finally:
            store.close()
    return emit(Report(options, figures={"incidents": count, **figures}, musts=musts))


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
        shown = as_values(snapshot(documents, observer.observe(documents, now, now)))
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
            done = store.transact(*write, deadline=Deadline.after(LIMIT_S))
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
        observer.observe(documents, number * LOOK_EVERY_S, number * LOOK_EVERY_S)
    return observer


def _size_mb(etcd: EtcdServer, field: str) -> float:
    return int(etcd.call("maintenance/status")[field]) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
