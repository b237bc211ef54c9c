"""Sharded models: steps against torch's HSDP by hand, the commit barrier, kills and joins; copies at a neighbour.

Two nodes of two ranks share this machine: a step, and what follows a fault, take several times what they would on
machines of their own; so steps are measured on one node too. The loops take turns in the same processes. Of the commit
barrier counts what it takes once the last rank has come: before, the others wait for what the step itself makes them
wait for, here for a turn on a core.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.ledger import LineKind
from tests.bench.calibration import calibrate
from tests.bench.report import Report, at_most, at_most_time, emit, median, note, parse
from tests.bench.step_overhead import Shape, compared, trained
from tests.drills.sharded.test_sharded import Sharded

JOB = Path(__file__).with_name("sharded_job.py")
PLACES = 2
COPYING = Shape(2, 1536, 32, 8, 100)
AT_50_MS, QUICK = Shape(2, 768, 256, 20, 5), Shape(2, 128, 8, 2, 3)
FAULTS, QUICK_FAULTS = 10, 1
WIDE, QUICK_WIDE = 1184, 48
"""Three blocks of 8 x width x width parameters: with AdamW's two moments each of two places holds 200 MB."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("sharded", __doc__, argv, repeats=3)
    shape, faults = (QUICK, QUICK_FAULTS) if options.quick else (AT_50_MS, FAULTS)
    copying = QUICK if options.quick else COPYING
    steps, alone, copies, calibrations = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer(Path(place, "etcd")) as etcd:
        for repeat in range(options.repeats):
            note(f"steps: {repeat + 1} of {options.repeats}")
            steps.append(stepped(Path(place, f"steps-{repeat}"), etcd.endpoint, shape))
            calibrations.append(calibrate())
            note(f"steps on one node: {repeat + 1} of {options.repeats}")
            alone.append(stepped(Path(place, f"alone-{repeat}"), etcd.endpoint, replace(shape, nodes=1)))
            note(f"copies at a neighbour: {repeat + 1} of {options.repeats}")
            copies.append(copied(Path(place, f"copies-{repeat}"), etcd.endpoint, copying))
        gaps = struck(Path(place), etcd.endpoint, faults)
        healing = healed(Path(place), etcd.endpoint, QUICK_WIDE if options.quick else WIDE)
        calibrations.append(calibrate())
    figures: dict[str, Any] = {
        "steps": {name: median([each[name] for each in steps]) for name in steps[0]} | {"repeats": steps},
        "one_node": {name: median([each[name] for each in alone]) for name in alone[0]} | {"repeats": alone},
        "copies": {name: median([each[name] for each in copies]) for name in copies[0]} | {"repeats": copies},
        "gaps_s": gaps,
        "healing": healing,
        "median_gaps_s": {name: median(each) for name, each in gaps.items()},
    }
    musts = [
        at_most("steps longer than HSDP by hand, %", figures["steps"]["longer_by_percent"], 3.0),
        at_most("one node: steps longer than FSDP by hand, %", figures["one_node"]["longer_by_percent"], 3.0),
        at_most("copies at a neighbour: steps longer, %", figures["copies"]["longer_by_percent"], 2.0),
        at_most_time("commit barrier once the last rank has come, ms", figures["steps"]["barrier_own_ms"], 0.5),
        *(at_most_time(f"{name}: survivors' pause, s", median(each), 0.3) for name, each in gaps.items()),
    ]
    return emit(Report(options, figures, musts, calibrations=calibrations))


def stepped(directory: Path, endpoint: str, shape: Shape) -> dict[str, float]:
    """Steps of a session beside those by hand, and the waits in the commit barrier."""
    taken = trained(directory, endpoint, "in_place", shape, job=JOB, workers=PLACES)
    waited, own = zip(*taken.pop("barrier"), strict=True)
    return compared(taken) | {"barrier_ms": 1e3 * median(waited), "barrier_own_ms": 1e3 * median(own)}


def copied(directory: Path, endpoint: str, shape: Shape) -> dict[str, float]:
    """What copies of shards at a neighbour cost at their default interval, sharded over two nodes of one rank.

    A block of steps is about as long as that interval: each with copies begins with one.
    """
    taken: dict[str, Any] = trained(directory, endpoint, "restart", shape, job=JOB)
    pairs = [(one[0], other[0]) for one, other in zip(taken["copied"], taken["not copied"], strict=True)]
    step_s, more_s = median([other for _, other in pairs]), median([one - other for one, other in pairs])
    known = {"copies": taken["copies"], "blocks": len(pairs), "state_mb": taken["state_mb"]}
    return {"step_ms": 1e3 * step_s, "longer_by_percent": 100.0 * more_s / step_s, **known}


def struck(place: Path, endpoint: str, faults: int) -> dict[str, list[float]]:
    """Kill a worker, then a node that another replaces, ``faults`` times: how long the other node stood still."""
    gaps: dict[str, list[float]] = {"worker_kill": [], "node_kill": [], "join": []}
    (directory := place / "faults").mkdir()
    sharded = Sharded(directory, endpoint, "sharded", pace_s=0.0)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for number in range(faults):
            note(f"faults: {number + 1} of {faults}")
            victim, other = job.running
            began = SYSTEM.monotonic()
            victim.kill_worker(1)
            sharded.await_together()
            gaps["worker_kill"].append(_longest_gap(sharded, other, began, within_s=1.0))
            began = SYSTEM.monotonic()
            victim.kill()
            pause(1.0)
            gaps["node_kill"].append(_longest_gap(sharded, other, began))
            began = SYSTEM.monotonic()
            job.add()
            sharded.await_together()
            gaps["join"].append(_longest_gap(sharded, other, began))
        job.finish()
    return gaps


def healed(place: Path, endpoint: str, width: int) -> dict[str, Any]:
    """A node takes the place of one that was killed: how long its places took to get their state, at the same time."""
    (directory := place / "healing").mkdir()
    sharded = Sharded(directory, endpoint, "healing", pace_s=0.0, width=width)
    with sharded.job as job:
        note("healing")
        job.start(2)
        sharded.await_together()
        job.running[0].kill()
        newcomer = job.add()
        sharded.await_together()
        lines = [line for line in job.log(newcomer.name).splitlines() if "round.entered" in line]
        job.finish()
    settled = [float(match[1]) for line in lines if (match := re.search(r'settle_s["=: ]+([\d.]+)', line))]
    return {"state_mb": 4e-6 * 3 * 24 * width**2 / PLACES, "settle_s": settled}


def _longest_gap(sharded: Sharded, node: Node, began: float, within_s: float = float("inf")) -> float:
    """Between two steps of ``node``, of which the second came after ``began`` (at most ``within_s`` after it)."""
    pause(0.3)
    steps = [line for line in sharded.job.lines() if line.event is LineKind.STEP and line.local_rank == 0]
    times = sorted(line.t for line in steps if line.node == node.name)
    return max(b - a for a, b in pairwise(times) if b > began and a < began + within_s)


if __name__ == "__main__":
    sys.exit(main())
