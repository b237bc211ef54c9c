"""Sharded models: steps against torch's HSDP by hand, the commit barrier, kills and joins; copies at a neighbour.

Two nodes of two ranks share this machine: a step, and what follows a fault, take several times what they would on
machines of their own; so steps are measured on one node too. The loops take turns in the same processes. Of the commit
barrier counts what it takes once the last rank has come: before, the others wait for what the step itself makes them
wait for, here for a turn on a core.

``job RESULT WIDTH BATCH ALTERNATIONS STEPS`` is the job: rank 0 writes what each block of steps took, and each wait in
the commit barrier: in all, and after the last rank of its node had come. In restart mode the model is sharded over the
whole job, and the session's loop alone takes turns: with copies of its shards in its agent's memory and the
neighbour's, and without.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic_trainer import Session
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.ledger import LineKind
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import worker_environment
from elastic_trainer.worker.model.sharded import ShardedReplica
from elastic_trainer.worker.state.saver import Saver
from tests.bench.report import Report, at_most, at_most_time, calibrate, emit, median, note, parse, repeated
from tests.bench.step_overhead import (
    WARM_UP,
    Shape,
    bare_steps,
    block,
    build,
    compared,
    in_turn,
    prepared,
    session_steps,
    trained,
)
from tests.drills.sharded.test_sharded import Sharded

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
    calibrations = []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer(Path(place, "etcd")) as etcd:
        root, there, one_node = Path(place), etcd.endpoint, replace(shape, nodes=1)
        steps = repeated(options, "steps", lambda n: stepped(root / f"steps-{n}", there, shape))
        calibrations.append(calibrate())
        alone = repeated(options, "steps on one node", lambda n: stepped(root / f"alone-{n}", there, one_node))
        copies = repeated(options, "copies at a neighbour", lambda n: copied(root / f"copies-{n}", there, copying))
        gaps = struck(Path(place), etcd.endpoint, faults)
        healing = healed(Path(place), etcd.endpoint, QUICK_WIDE if options.quick else WIDE)
        calibrations.append(calibrate())
    figures: dict[str, Any] = {
        "steps": steps,
        "one_node": alone,
        "copies": copies,
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
    taken = trained(directory, endpoint, "in_place", shape, job=Path(__file__), workers=PLACES)
    waited, own = zip(*taken.pop("barrier"), strict=True)
    return compared(taken) | {"barrier_ms": 1e3 * median(waited), "barrier_own_ms": 1e3 * median(own)}


def copied(directory: Path, endpoint: str, shape: Shape) -> dict[str, float]:
    """What copies of shards at a neighbour cost at their default interval, sharded over two nodes of one rank.

    A block of steps is about as long as that interval: each with copies begins with one.
    """
    taken: dict[str, Any] = trained(directory, endpoint, "restart", shape, job=Path(__file__))
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


# ---- the job


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def timed(waits: list[tuple[float, float]]) -> None:
    """Let each commit barrier add when this rank came and when it went on to ``waits``."""
    meet: Callable[..., None] = ShardedReplica.commit_together

    def commit_together(self: ShardedReplica, number: int) -> None:
        began = time.perf_counter()
        meet(self, number)
        waits.append((began, time.perf_counter()))

    ShardedReplica.commit_together = commit_together  # type: ignore[method-assign]


def train(result: Path, width: int, batch: int, alternations: int, count: int) -> None:
    data, waits = prepared(), list[tuple[float, float]]()
    timed(waits)
    with Session(device="cpu") as session:
        mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",))
        with session.parallelizing():
            model = sharded(build(width)[0], mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer)
        loops: dict[str, Iterator[None]] = {"session": session_steps(session, wrapped, optimizer, data, batch)}
        places = int(os.environ["LOCAL_WORLD_SIZE"])
        by_hand = init_device_mesh("cpu", (session.world_size // places, places), mesh_dim_names=("copy", "shard"))
        for name in ("bare", "bare again"):
            twin = sharded(build(width)[0], by_hand)
            loops[name] = bare_steps(
                session, twin, torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9), data, batch
            )
        for steps in loops.values():
            block(steps, WARM_UP)
        waits.clear()
        taken = in_turn(loops, alternations, count)
        others = [result.with_name(f"{result.name}.{rank}") for rank in range(places)]
        if 0 < session.rank < places:
            others[session.rank].write_text(json.dumps(waits))
        session.barrier()
        if session.is_rank0:
            came = [[began for began, _ in json.loads(each.read_text())] for each in others[1:]]
            barrier = [
                [went - mine, max(0.0, went - max(mine, *theirs))]
                for (mine, went), *theirs in zip(waits, *came, strict=True)
            ]
            result.write_text(json.dumps(taken | {"barrier": barrier}))


def train_with_copies(result: Path, width: int, batch: int, alternations: int, count: int) -> None:
    data = prepared()
    due, copies = Saver.wants_copy, {"allowed": True, "made": 0}

    def wants_copy(self: Saver) -> bool:
        wanted = bool(copies["allowed"]) and due(self)
        copies["made"] += wanted
        return wanted

    Saver.wants_copy = wants_copy  # type: ignore[method-assign]
    with Session(result.with_name("checkpoints"), device="cpu", checkpoint_every_s=None) as session:
        mesh = session.init_device_mesh((-1,), mesh_dim_names=("dp_shard",), whole_job=True)
        with session.parallelizing():
            model = sharded(build(width)[0], mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        steps = session_steps(session, session.wrap(model, optimizer=optimizer), optimizer, data, batch)

        def told(*, allowed: bool) -> Iterator[None]:
            while True:
                copies["allowed"] = allowed
                yield next(steps)

        block(steps, WARM_UP)
        copies["made"] = 0
        taken = in_turn({"copied": told(allowed=True), "not copied": told(allowed=False)}, alternations, count)
        if session.is_rank0:
            size = sum(each.nbytes for each in model.parameters()) * 2
            result.write_text(json.dumps(taken | {"copies": copies["made"], "state_mb": size / 1e6}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        whole_job = worker_environment().recovery is RecoveryMode.RESTART
        (train_with_copies if whole_job else train)(Path(sys.argv[2]), *map(int, sys.argv[3:7]))
    else:
        sys.exit(main())
