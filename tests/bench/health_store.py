"""A run of many nodes as their agents would write it into a real etcd, for the benchmark of the monitor."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Self

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.documents import (
    Incident,
    JournalEntry,
    NodeHealth,
    NodeRecord,
    NodeState,
    RankHealth,
    RoundDocument,
    RoundMember,
    RoundState,
    Saved,
    Spec,
)
from elastic_trainer.model import Cause, Phase
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import Operation, Put, RunKeys
from elastic_trainer.telemetry.families import CAUSES, PHASES, RECOVERY_BUCKETS, SAVE_BUCKETS

RANKS = 8
EVERY_S = 5.0
"""How often a node writes its health."""
JOURNAL = 200
INCIDENTS = 100
BATCH = 50
LIMIT_S = 120.0


def name(number: int) -> str:
    return f"trainer-{number:05d}"


def counters(number: int) -> dict[str, float]:
    hists: dict[str, tuple[float, ...]] = {"save_s": SAVE_BUCKETS, "load_s": SAVE_BUCKETS}
    hists |= {f"recovery_s.{kind}": RECOVERY_BUCKETS for kind in ("failure", "planned", "start")}
    told = {f"seconds.{phase}": 1000.0 + number + position for position, phase in enumerate(PHASES)}
    told |= {f"ended.{cause}": float(number % 7) for cause in CAUSES}
    told |= {f"{op}.{result}": 3.0 for op in ("save", "load") for result in ("ok", "failed")}
    told |= {"samples": 123456.0, "steps": 2345.0, "nonfinite_steps": 0.0}
    for hist, bounds in hists.items():
        told |= {f"{hist}.le.{bound}": 1.0 for bound in bounds}
        told |= {f"{hist}.sum": 12.5, f"{hist}.count": float(len(bounds))}
    return told


def health(number: int, step: int) -> NodeHealth:
    ranks = tuple(
        RankHealth(
            rank=RANKS * number + local,
            local_rank=local,
            pid=4000 + local,
            phase=str(Phase.TRAINING),
            phase_s=12.345,
            still_s=0.123,
            step=step,
            step_s=0.25 + random.random() / 100,
            compute_s=0.21 + random.random() / 100,
            device=f"cuda:{local}",
        )
        for local in range(RANKS)
    )
    saved = Saved(step=step, wall=SYSTEM.wall(), bytes=10**9, duration_s=3.2) if number == 0 else None
    return NodeHealth(
        node=name(number),
        host=f"host-{number}",
        wall=SYSTEM.wall(),
        metrics=f"http://10.0.{number // 250}.{number % 250}:9400",
        round=JOURNAL,
        ranks=ranks,
        counters=counters(number),
        loss=1.2345,
        saved=saved,
        save_interval_s=60.0,
    )


class SimulatedRun:
    """``nodes`` nodes with 8 ranks each. As a context manager it keeps writing their health, as they would."""

    def __init__(self, endpoint: str, run: str, nodes: int) -> None:
        self.nodes = nodes
        self._keys = RunKeys("/elastic_trainer", run)
        self._store = connect(StoreSettings(endpoints=parse_endpoints(endpoint)))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="nodes", daemon=True)
        self._step = 1
        self.written = 0

    def __enter__(self) -> Self:
        self._fill()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(LIMIT_S)
        self._store.close()

    def tell_progress(self, step: int) -> None:
        progress = Progress(round=JOURNAL, step=step, epoch=1, samples=64 * step, loss=1.0, step_time_s=0.25)
        self._write([Put(self._keys.progress, progress.encode().strip())])

    def _fill(self) -> None:
        keys, numbers = self._keys, range(self.nodes)
        self._write([Put(keys.spec, Spec(min_nodes=1, max_nodes=self.nodes).encode())])
        record = NodeRecord(
            host="host",
            address="10.0.0.1",
            local_world_size=RANKS,
            store_port=29400,
            probe_port=29401,
            state=NodeState.READY,
        ).encode()
        self._write([Put(keys.node(name(number)), record) for number in numbers])
        self._write([Put(keys.node_health(name(number)), health(number, 1).encode()) for number in numbers])
        created = {
            item.key: item.create_revision
            for item in self._store.range(keys.nodes, Deadline.after(LIMIT_S), keys_only=True).items
        }
        members = tuple(RoundMember(name(n), created[keys.node(name(n))], 0, RANKS * n, RANKS) for n in numbers)
        names = tuple(map(name, numbers))
        for number in range(1, JOURNAL + 1):
            entry = JournalEntry(
                wall=SYSTEM.wall(),
                by=names[0],
                round=number,
                state=RoundState.ACTIVE,
                reason="all nodes are ready",
                nodes=names,
                world_size=RANKS * self.nodes,
            )
            self._write([Put(keys.event(4 * number), entry.encode())])
        for number in range(1, INCIDENTS + 1):
            incident = Incident(wall=SYSTEM.wall(), by=names[0], cause=Cause.NODE_LOST, round=number, nodes=names[:1])
            self._write([Put(keys.incident(number), incident.encode())])
        document = RoundDocument(number=JOURNAL, nonce="x", state=RoundState.ACTIVE, members=members, reason="start")
        self._write([Put(keys.round, document.encode())])

    def _write(self, operations: Sequence[Operation]) -> None:
        for start in range(0, len(operations), BATCH):
            self._store.transact([], operations[start : start + BATCH], deadline=Deadline.after(LIMIT_S))

    def _keep_writing(self) -> None:
        """Each node once in every five seconds, one request each, spread over the time."""
        started = SYSTEM.monotonic()
        while not self._stopped.is_set():
            number = self.written % self.nodes
            self._step += number == 0
            self._write([Put(self._keys.node_health(name(number)), health(number, self._step).encode())])
            self.written += 1
            SYSTEM.wait(self._stopped, started + self.written * EVERY_S / self.nodes - SYSTEM.monotonic())
