"""Recovery of a plain script: start below max, a worker and a node killed, a node joining, against torchrun's c10d.

Columns are ways to launch the same script on three nodes of this machine; each is measured in turn, several times. A
run that does not recover within its limit is reported as failed and counts as infinite. ``pause_s`` is how long the
members that were at work stood still; ``rendezvous_s`` is the part of it from the moment the last node asked torchrun
for a new round until the last one had it. torchft takes part where ``--torchft-python`` names an environment with it.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from elastic_trainer.clock import SYSTEM
from elastic_trainer.local.etcd import EtcdServer
from tests.bench.recovery_jobs import TWIN, Column, Cost, Job, join, kill_node, kill_worker, look, peers, start
from tests.bench.report import Must, Report, alternate, at_least, at_most, at_most_time, emit, median, note, parse

TTL_S = 3.0
LAST_CALL_S = 1.0
ROWS = ("start_below_max", "node_join", "worker_kill", "node_kill")
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
IN_PLACE = {"recovery": "in_place", "join_interval": "0.5"}
TUNED = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
KILLS = {"etcd3_restart": 50, "etcd3_in_place": 100, "c10d_default": 5, "torchft_tuned": 50}
"""Workers killed in a row, by column."""
LIMIT_S, QUICK_LIMIT_S = 120.0, 30.0
"""After this a recovery has failed; stock torchrun's slowest takes about 50 s."""


def columns(endpoint: str) -> dict[str, Column]:
    """The configurations, by name. The first is this project's; ``c10d_tuned`` is as fast as torchrun itself can be."""
    restart = {"ttl": f"{TTL_S:g}", "last_call": f"{LAST_CALL_S:g}", "join_interval": "1"}
    chosen = [
        Column("etcd3_restart", "etcd3", endpoint, restart),
        Column("etcd3_in_place", "etcd3", endpoint, restart | IN_PLACE, script=(TWIN, "session"), in_place=True),
        Column("c10d_tuned", "c10d", options=TUNED, environment=SHARED_STORE_OFF),
    ]
    return {column.name: column for column in chosen}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("recovery", __doc__, argv, repeats=3, quick_repeats=1, extend=_own_options)
    torchft_python: Path | None = options.extra.torchft_python
    torchft = look(torchft_python)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer() as etcd:
        chosen = columns(etcd.endpoint)
        if options.quick:
            del chosen["c10d_tuned"]  # its workers all start cold, each time
        else:
            chosen["c10d_default"] = Column("c10d_default", "c10d")
        if torchft_python is not None and "skipped" not in torchft:
            chosen |= peers(torchft_python, options.quick)
        limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
        calls = {name: partial(measure, column, Path(place), limit_s) for name, column in chosen.items()}
        costs = alternate(calls, options.repeats)
        process_s = [process_start(Path(place), limit_s) for _ in range(options.repeats)]
        series = {name: [cost["worker_kill"] for cost in found] for name, found in costs.items()}  # a row of one
        if not options.quick:
            counts = {name: count for name, count in KILLS.items() if name in chosen}
            series = {name: kill_series(chosen[name], Path(place), count, limit_s) for name, count in counts.items()}
    rows = {row: {name: [cost[row] for cost in found] for name, found in costs.items()} for row in ROWS}
    figures = {
        "columns": {name: column.as_json() for name, column in chosen.items()},
        "torchft": torchft,
        "rows": {row: {name: _as_json(found) for name, found in by_column.items()} for row, by_column in rows.items()},
        "process_start_s": process_s,
        "worker_kills_in_a_row": {name: _as_json(found) for name, found in series.items() if found},
    }
    return emit(Report(options, figures, [*musts(rows, process_s, series["etcd3_restart"]), *in_place(rows, series)]))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torchft-python", type=Path, help="the python of an environment with torch and torchft")


def measure(column: Column, place: Path, limit_s: float) -> dict[str, Cost]:
    """All rows once: on one job as long as it recovers, on a fresh one after a failure."""
    found: dict[str, Cost] = {}
    with column.job(place) as job:
        found["start_below_max"] = start(job, 2, limit_s)
        if found["start_below_max"].recovered:
            found["node_join"] = join(job, limit_s)
        if found.get("node_join", found["start_below_max"]).recovered:
            found["worker_kill"] = kill_worker(job, job.nodes[1].name, limit_s)
            if found["worker_kill"].recovered:
                found["node_kill"] = kill_node(job, job.nodes[2].name, limit_s)
    for row in ROWS:
        if row not in found:
            found[row] = _afresh(row, column, place, limit_s)
        note(f"  {column.name} {row}: {found[row].seconds:.2f} s (rendezvous {found[row].rendezvous_s:.2f} s)")
    return found


def _afresh(row: str, column: Column, place: Path, limit_s: float) -> Cost:
    with column.job(place) as job:
        begun = start(job, 2 if row == "node_join" else 3, limit_s)
        if not begun.recovered:
            return begun
        if row == "node_join":
            return join(job, limit_s)
        return (kill_worker if row == "worker_kill" else kill_node)(job, job.nodes[2].name, limit_s)


def process_start(place: Path, limit_s: float) -> float:
    """What starting costs without any meeting: two jobs of one node each, at the same time, until both have stepped."""
    alone = Column("alone", "c10d")
    with Job(alone, place, least=1, most=1) as one, Job(alone, place, least=1, most=1) as other:
        begun_at = SYSTEM.monotonic()
        other.start(1)
        one.start(1)
        if not one.await_world(1, limit_s) or not other.await_world(1, limit_s):
            return math.inf
        return max(job.steps("n0")[0].t for job in (one, other)) - begun_at


def kill_series(column: Column, place: Path, kills: int, limit_s: float, world: int = 3) -> list[Cost]:
    """Workers of all nodes in turn are killed ``kills`` times; a job that does not recover is replaced."""
    found: list[Cost] = []
    while len(found) < kills:
        with column.job(place) as job:
            if not start(job, world, limit_s).recovered:
                return [*found, *[Cost(math.inf)] * (kills - len(found))]
            while len(found) < kills:
                found.append(kill_worker(job, f"n{len(found) % world}", limit_s))
                note(f"  {column.name}: kill {len(found)} of {kills}: {found[-1].seconds:.2f} s")
                if not found[-1].recovered:
                    break
    return found


def _as_json(costs: Sequence[Cost]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "seconds": [cost.seconds for cost in costs],
        "median_s": median(cost.seconds for cost in costs),
        "recovered": sum(cost.recovered for cost in costs),
        "of": len(costs),
    }
    for name in ("pause_s", "rendezvous_s"):
        values = [value for value in (getattr(cost, name) for cost in costs) if not math.isnan(value)]
        if values:
            told[f"median_{name}"] = median(values)
    return told


Rows = Mapping[str, Mapping[str, Sequence[Cost]]]
"""Costs by row, then by column."""


def musts(rows: Rows, process_s: Sequence[float], kills: Sequence[Cost]) -> list[Must]:

    def middle(row: str, column: str, name: str = "seconds") -> float:
        return float(median(getattr(cost, name) for cost in rows[row][column]))

    def over_c10d(row: str, name: str = "seconds") -> float:
        mine, peer = middle(row, "etcd3_restart", name), middle(row, "c10d_tuned", name)
        return mine / peer if math.isfinite(mine) else math.inf  # a peer that never recovered makes any time good

    promised: list[Must] = []
    if "c10d_tuned" in rows["node_join"]:
        promised = [at_most(f"{row}: etcd3 over tuned c10d", over_c10d(row), 1.0) for row in ROWS if row != "node_join"]
        stopped = over_c10d("node_join", "pause_s")
        promised.append(at_most("node_join, members standing still: etcd3 over tuned c10d", stopped, 1.0))
    return [
        *promised,
        at_most(
            "start_below_max over process start and last call",
            middle("start_below_max", "etcd3_restart") / (median(process_s) + LAST_CALL_S),
            1.3,
        ),
        at_most_time("worker_kill, rendezvous part, s", middle("worker_kill", "etcd3_restart", "rendezvous_s"), 1.0),
        at_most_time(
            "node_kill, rendezvous part, s", middle("node_kill", "etcd3_restart", "rendezvous_s"), 1.0, timers=TTL_S
        ),
        at_least("worker kills in a row that recovered", sum(cost.recovered for cost in kills), len(kills)),
    ]


def in_place(rows: Rows, series: Mapping[str, Sequence[Cost]]) -> list[Must]:
    limits = {"worker_kill": 0.2, "node_kill": 0.5}
    found = {row: [cost.seconds for cost in rows[row]["etcd3_in_place"]] for row in limits}
    kills = series["etcd3_in_place"]
    return [
        *(at_most_time(f"in place: {row}, s", float(median(found[row])), limit) for row, limit in limits.items()),
        at_most_time(
            "in place: node_join, members standing still, s",
            float(median(cost.pause_s for cost in rows["node_join"]["etcd3_in_place"])),
            0.3,
        ),
        at_most_time(
            "in place: median of worker kills in a row, s", float(median(cost.seconds for cost in kills)), 0.2
        ),
        at_least("in place: worker kills in a row that recovered", sum(c.recovered for c in kills), len(kills)),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
