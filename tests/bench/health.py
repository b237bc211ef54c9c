"""Health: what watching 10,000 ranks costs: the monitor's scrape, memory, processor, series, delay and JSON.

1,250 simulated nodes of 8 ranks each write to a real etcd what their agents would, at the rate at which they would; the
monitor is the real command in a process of its own. Bench, etcd and monitor share this machine.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.ipc.page import Heartbeat, PageWriter, start_of
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.model import Phase
from elastic_trainer.monitor import page
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.monitor.snapshot import as_json, snapshot
from elastic_trainer.monitor.state import Observer
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.store.api import RunKeys
from elastic_trainer.telemetry.families import FAMILIES, Family, MetricSource
from elastic_trainer.web.node import NodeCollector, NodeEndpoint
from elastic_trainer.worker.report import HeartbeatReporter
from tests.bench.health_store import LIMIT_S, RANKS, SimulatedRun
from tests.bench.report import Must, Options, Report, at_most, at_most_time, emit, median, note, parse
from tests.support import snapshots

NODES, QUICK_NODES = 1250, 40
SNAPSHOT_NODES, QUICK_SNAPSHOT_NODES = 512, 20
STEADY_S, QUICK_STEADY_S = 20.0, 2.0
RUN, SMALLER = "large", "smaller"
SCRAPE_LIMIT_S = 1.0
MEMORY_LIMIT_MB = 500.0
SERIES_LIMIT = 200_000
PAGE_LIMIT_US = 5.0
NODE_SCRAPE_LIMIT_MS = 5.0
PAGE_NODES = (1, 8, 512)
PAGE_UPDATE_LIMIT_MS = 50.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("health", __doc__, argv, repeats=5, quick_repeats=3)
    figures, musts = _monitor_side(options)
    of_nodes, node_musts = _node_side(options)
    pages, page_musts = _status_page(max(3, options.repeats))
    return emit(Report(options, figures={**figures, **of_nodes, **pages}, musts=[*musts, *node_musts, *page_musts]))


# ---- the monitor


def _monitor_side(options: Options) -> tuple[dict[str, Any], list[Must]]:
    nodes = QUICK_NODES if options.quick else NODES
    with EtcdServer() as etcd:
        note(f"{nodes} nodes are written")
        with SimulatedRun(etcd.endpoint, RUN, nodes) as run, _monitor(etcd.endpoint) as (process, port):
            figures = _watched(options, run, process, port)
        snapshot_nodes = QUICK_SNAPSHOT_NODES if options.quick else SNAPSHOT_NODES
        note(f"{snapshot_nodes} nodes are encoded")
        figures |= _encoded(etcd.endpoint, snapshot_nodes, max(3, options.repeats))
    per_node = sum(map(_series_of_node, FAMILIES))
    total = figures["monitor_series"] + nodes * per_node
    figures |= {"nodes": nodes, "ranks": nodes * RANKS, "series_per_node": per_node, "series": total}
    ranks = nodes * RANKS
    return figures, [
        at_most_time(f"scrape of the monitor, {ranks} ranks, s", figures["scrape_median_s"], SCRAPE_LIMIT_S),
        at_most(f"memory of the monitor, {ranks} ranks, MB", figures["memory_peak_mb"], MEMORY_LIMIT_MB),
        at_most(f"series of all endpoints, {ranks} ranks", total, SERIES_LIMIT),
    ]


def _watched(options: Options, run: SimulatedRun, process: psutil.Process, port: int) -> dict[str, Any]:
    _await_nodes(port, run.nodes)
    repeats = max(3, options.repeats)
    scrapes = [_timed(port, "/metrics") for _ in range(repeats)]
    snapshots = [_timed(port, f"/api/runs/{RUN}") for _ in range(repeats)]
    note("delays are measured")
    updates = [_update_s(run, port, step) for step in range(10_000, 10_000 + repeats)]
    note("the steady state is measured")
    busy, began, written = _busy_s(process), SYSTEM.monotonic(), run.written
    pause(QUICK_STEADY_S if options.quick else STEADY_S)
    passed = SYSTEM.monotonic() - began
    return {
        "scrape_s": [seconds for seconds, _ in scrapes],
        "scrape_median_s": median([seconds for seconds, _ in scrapes]),
        "scrape_bytes": len(scrapes[-1][1]),
        "monitor_series": sum(not line.startswith(b"#") for line in scrapes[-1][1].splitlines()),
        "run_json_request_median_s": median([seconds for seconds, _ in snapshots]),
        "run_json_bytes": len(snapshots[-1][1]),
        "write_to_stream_s": updates,
        "write_to_stream_median_s": median(updates),
        "monitor_cores": (_busy_s(process) - busy) / passed,
        "health_writes_per_s": (run.written - written) / passed,
        "memory_peak_mb": _peak_mb(process.pid),
    }


@contextmanager
def _monitor(endpoint: str) -> Iterator[tuple[psutil.Process, int]]:
    words = ["monitor", "--endpoint", endpoint, "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "elastic_trainer.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()


def _timed(port: int, path: str) -> tuple[float, bytes]:
    """Seconds from request to the last byte, and the content."""
    began = SYSTEM.monotonic()
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as answer:
        content = answer.read()
    return SYSTEM.monotonic() - began, content


def _await_nodes(port: int, nodes: int) -> None:
    deadline = Deadline.after(LIMIT_S)
    while not deadline.expired:
        runs = json.loads(_timed(port, "/api/runs")[1])["runs"]
        if runs and runs[0]["nodes"] == nodes:
            return
        pause(0.2)
    raise SystemExit("the monitor does not see the nodes")


def _update_s(run: SimulatedRun, port: int, step: int) -> float:
    """Seconds from a write to the store until a listener has the snapshot with it."""
    deadline = Deadline.after(LIMIT_S)
    with urlopen(f"http://127.0.0.1:{port}/api/runs/{RUN}/stream", timeout=LIMIT_S) as stream:
        while not stream.readline().startswith(b"data: "):
            pass
        began = SYSTEM.monotonic()
        run.tell_progress(step)
        while not deadline.expired:
            line = stream.readline()
            if line.startswith(b"data: ") and json.loads(line.removeprefix(b"data: "))["step"] == step:
                return SYSTEM.monotonic() - began
    return math.inf


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_mb(pid: int) -> float:
    """The most memory that the process ever held (MB of 10^6 bytes)."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def _encoded(endpoint: str, nodes: int, repeats: int) -> Mapping[str, Any]:
    """From documents to JSON, as it is done once for each poll that somebody looks at."""
    with SimulatedRun(endpoint, SMALLER, nodes):
        store = connect(StoreSettings(endpoints=parse_endpoints(endpoint)))
        began = SYSTEM.monotonic()
        documents = RunFeed(store, RunKeys("/elastic_trainer", SMALLER)).read(Deadline.after(LIMIT_S))
        read_s = SYSTEM.monotonic() - began
        store.close()
    seen, seconds, content = Observer().observe(documents, 0.0, 0.0), [], b""
    for _ in range(repeats):
        began = SYSTEM.monotonic()
        content = as_json(snapshot(documents, seen))
        seconds.append(SYSTEM.monotonic() - began)
    return {
        "snapshot_nodes": nodes,
        "snapshot_first_read_s": read_s,
        "snapshot_s": seconds,
        "snapshot_median_s": median(seconds),
        "snapshot_bytes": len(content),
    }


def _series_of_node(family: Family) -> int:
    """How many series the endpoint of a node with 8 ranks has of ``family``."""
    if family.source is not MetricSource.NODE:
        return 0
    values = math.prod(len(each) for each in family.values.values())
    return values * (RANKS if "rank" in family.labels else 1)


# ---- the status page


def _status_page(repeats: int) -> tuple[dict[str, Any], list[Must]]:
    """What a browser is sent when each rank has made a step: before, the snapshot; now, the lines that have changed."""
    figures: dict[str, Any] = {}
    for nodes in PAGE_NODES:
        runs = [snapshots.large(nodes, turn=turn) for turn in range(repeats + 1)]
        before, sent, taken = page.run_update(runs[0]), [], []
        for run in runs[1:]:
            began = SYSTEM.monotonic()
            now = page.run_update(run)
            sent.append(len(page.message(now, before)))
            taken.append(1000 * (SYSTEM.monotonic() - began))
            before = now
        figures |= {
            f"page_snapshot_bytes_{nodes * RANKS}_ranks": len(as_json(runs[-1])),
            f"page_first_bytes_{nodes * RANKS}_ranks": len(page.message(before)),
            f"page_update_bytes_{nodes * RANKS}_ranks": median([float(each) for each in sent]),
            f"page_update_ms_{nodes * RANKS}_ranks": median(taken),
        }
    taken_ms = figures[f"page_update_ms_{PAGE_NODES[1] * RANKS}_ranks"]
    return figures, [at_most_time("server's part of an update of a page, 64 ranks, ms", taken_ms, PAGE_UPDATE_LIMIT_MS)]


# ---- the nodes


def _node_side(options: Options) -> tuple[dict[str, Any], list[Must]]:
    """What health costs a node itself: writing a page at each step, and a scrape of its endpoint."""
    note("a node is measured")
    repeats = max(3, options.repeats)
    beats = 20_000 // repeats
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        pages = Pages(root=Path(root))
        try:
            assert pages.directory is not None
            workers = [_worker(pages.directory, local_rank) for local_rank in range(RANKS)]
            writer, pulse = workers[0]
            write_us = median([_beat_us(writer, pulse, beats) for _ in range(repeats)])
            collector = NodeCollector(RUN, "n0", pages.living, pages.nonfinite_losses, pages.counters, None)
            with closing(NodeEndpoint("127.0.0.1", 0, collector)) as endpoint:
                scrapes = [_timed(endpoint.port, "/metrics") for _ in range(20)]
        finally:
            pages.close()
    scrape_ms = 1000 * median([seconds for seconds, _ in scrapes])
    lines = scrapes[0][1].decode().splitlines()
    figures = {
        "page_write_us": write_us,
        "step_told_us": median([_commit_us(beats) for _ in range(repeats)]),
        "node_scrape_ms": scrape_ms,
        "node_series": sum(not line.startswith("#") for line in lines),
    }
    return figures, [
        at_most_time("page: write at each step, us", write_us, PAGE_LIMIT_US),
        at_most_time(f"scrape of a node with {RANKS} ranks, ms", scrape_ms, NODE_SCRAPE_LIMIT_MS),
    ]


def _worker(directory: Path, local_rank: int) -> tuple[PageWriter, Heartbeat]:
    writer = PageWriter.create(directory / f"{local_rank}-{os.getpid()}.page")
    writer.write_notes({"pid": os.getpid(), "start": start_of("self"), "local_rank": local_rank, "device": "cpu"})
    pulse = Heartbeat(phase=Phase.TRAINING, rank=local_rank, world_size=RANKS, round=1, step=1000, fresh=1000)
    writer.beat(pulse)
    return writer, pulse


def _beat_us(writer: PageWriter, pulse: Heartbeat, beats: int) -> float:
    began = SYSTEM.monotonic()
    for step in range(beats):
        pulse.step = step
        writer.beat(pulse)
    return (SYSTEM.monotonic() - began) / beats * 1e6


def _commit_us(steps: int) -> float:
    tracker = HeartbeatReporter()
    began = SYSTEM.monotonic()
    for step in range(1, steps + 1):
        tracker.step_begins(step)
        tracker.enter(tracker.draws())
        tracker.begin_wait()
        tracker.resumes()
        tracker.note_step(step, 32)
    return (SYSTEM.monotonic() - began) / steps * 1e6


if __name__ == "__main__":
    raise SystemExit(main())
