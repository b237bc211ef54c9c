"""What a session costs per step, against bare DDP loops with the same model in the same processes, taking turns.

Once with steps of about 20 ms on two ranks, where the whole difference counts; once alone with a tiny model, where the
main thread's processor time shows what the session itself takes outside collectives; and once with an audit in each
step, of which a hundredth is the cost of one in a hundred steps.

``job RESULT WIDTH BATCH ALTERNATIONS STEPS AUDIT_EVERY`` is the job: rank 0 writes what each block of steps took.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.clock import Deadline
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.drills.stage import IN_PLACE
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.steps.options import CheckOptions
from elastic_trainer.worker.steps.records import StepRecords
from tests.bench.report import (
    STEADY,
    Calibration,
    Report,
    at_most,
    at_most_time,
    calibrate,
    emit,
    median,
    parse,
    repeated,
)

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: nodes of one rank, the width of its model, samples a rank and step, blocks of each loop, steps a block.

    ``audit_every``: as in CheckOptions; 0: no audits.
    """

    nodes: int
    width: int
    batch: int
    alternations: int
    steps: int
    audit_every: int = 0


AT_20_MS = Shape(nodes=2, width=512, batch=512, alternations=40, steps=10)
TINY = Shape(nodes=1, width=8, batch=8, alternations=40, steps=200)
SHAPES = {"20 ms": AT_20_MS, "tiny": TINY, "audited": replace(AT_20_MS, audit_every=1)}
QUICK = {"20 ms": Shape(2, 256, 8, 4, 5), "tiny": Shape(1, 8, 8, 4, 20), "audited": Shape(2, 256, 8, 4, 5, 1)}
MODES = {"restart": {}, "in_place": IN_PLACE}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("step_overhead", __doc__, argv, repeats=3)
    shapes = QUICK if options.quick else SHAPES
    figures: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    calibrations: list[Calibration] = []
    with tempfile.TemporaryDirectory(prefix="elastic-bench-") as place, EtcdServer(Path(place, "etcd")) as etcd:
        for mode, name in product(MODES, shapes):
            if name == "audited" and mode != "restart":
                continue  # the same passes

            def once(repeat: int, mode: str = mode, name: str = name) -> dict[str, float]:
                directory = Path(place, f"{mode}-{name.replace(' ', '')}-{repeat}")
                return compared(trained(directory, etcd.endpoint, mode, shapes[name]))

            figures[mode][name] = repeated(options, f"{mode}, {name}", once)
            calibrations.append(calibrate())
    audited = figures["restart"]["audited"]["longer_by_percent"] - figures["restart"]["20 ms"]["longer_by_percent"]
    musts = [at_most("an audit in 100 steps: longer by, % of a 20 ms step", audited / 100.0, 1.5)]
    for mode in MODES:
        musts += [
            at_most(f"{mode}: longer by, % of a 20 ms step", figures[mode]["20 ms"]["longer_by_percent"], 1.0),
            at_most_time(
                f"{mode}: main thread's time for a step alone, us", figures[mode]["tiny"]["thread_us_more"], 60
            ),
        ]
    figures["ledger"] = repeated(options, "a step's record in the ledger", lambda repeat: {"record_us": record_us()})
    record = figures["ledger"]["record_us"]
    musts.append(at_most_time("a step's record in the ledger, us (0.5 % of 20 ms)", record, 100))
    return emit(Report(options, figures, musts, calibrations=calibrations))


def record_us(steps: int = 20_000) -> float:
    """What it takes to make the record of a step that has a loss and a norm."""
    feed: Any = SimpleNamespace(cut=(EpochPlan(10**6, 64), 0), kind="TensorDataset", lr_factor=1.0)
    records = StepRecords(None, WorkerEnvironment(), feed, 0)
    records.begin_round(Control(), DataPart(0, 2), 0, 1)
    loss, batch = torch.tensor(1.5), SimpleNamespace(following=Cursor(0, 64), covers=64)
    step: Any = SimpleNamespace(batch=batch, skipped=False, world_size=2, norm=torch.tensor(2.0), known_mean=None)
    step.loss_terms = lambda: [(loss, 1.0)]
    began = time.perf_counter()
    for number in range(1, steps + 1):
        step.number = number
        records.add(step, Cursor(0, 64 * (number - 1)), 0.1)
    return 1e6 * (time.perf_counter() - began) / steps


def compared(taken: dict[str, list[list[float]]]) -> dict[str, float]:
    """Blocks next to each other form groups: what slows the machine for a while meets all.

    The two bare loops differ from each other only by where their tensors lie: that much is noise.
    """
    turns = list(zip(taken["session"], taken["bare"], taken["bare again"], strict=True))
    wall, used = ([[loop[kind] for loop in turn] for turn in turns] for kind in (0, 1))
    bare_s = median([(one + other) / 2 for _, one, other in wall])
    more_s = median([mine - (one + other) / 2 for mine, one, other in wall])
    return {
        "bare_step_ms": 1e3 * bare_s,
        "more_us": 1e6 * more_s,
        "longer_by_percent": 100.0 * more_s / bare_s,
        "noise_percent": 100.0 * abs(median([one - other for _, one, other in wall])) / bare_s,
        "thread_us_more": 1e6 * median([mine - (one + other) / 2 for mine, one, other in used]),
    }


def trained(
    directory: Path, endpoint: str, mode: str, shape: Shape, *, job: Path = Path(__file__), workers: int = 1
) -> dict[str, list[list[float]]]:
    directory.mkdir()
    result = directory / "result.json"
    numbers = (shape.width, shape.batch, shape.alternations, shape.steps, shape.audit_every)
    spec = ClusterSpec(
        run=directory.name,
        directory=directory,
        endpoint=endpoint,
        entry=[str(job), "job", str(result), *map(str, numbers)],
        min_nodes=shape.nodes,
        max_nodes=shape.nodes,
        workers=workers,
        options={"last_call": "1", **MODES[mode]},
        environment=STEADY | {"PYTHONPATH": str(ROOT)},
    )
    with LocalCluster(spec) as cluster:
        cluster.start(shape.nodes)
        if not cluster.wait(Deadline.after(LIMIT_S)) or not result.exists():
            logs = "\n".join(node.log.read_text(errors="replace")[-2000:] for node in cluster.nodes)
            raise RuntimeError(f"the job did not end well:\n{logs}")
    taken: dict[str, list[list[float]]] = json.loads(result.read_text())
    return taken


# ---- the job

FEATURES, CLASSES, SAMPLES, WARM_UP = 64, 10, 4096, 10
ENDLESS = 1_000_000


def prepared(*shape: int) -> TensorDataset:
    """Random samples of ``shape`` (default: FEATURES), for one thread of a process that writes no ledger."""
    torch.set_num_threads(1)
    os.environ.pop(ENV_LEDGER_DIR, None)  # the ledger is the local cluster's, not the session's
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, *(shape or (FEATURES,)), generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose step takes about ``width`` squared."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def session_steps(session: Session, model: nn.Module, optimizer: Any, data: Any, batch: int) -> Iterator[None]:
    for part in session.batches(data, global_batch_size=batch * session.world_size, epochs=ENDLESS):
        with session.step() as step:
            step.backward(cross_entropy(model(part.x), part.y))
            optimizer.step()
        yield


def bare_steps(session: Session, model: nn.Module, optimizer: Any, data: TensorDataset, batch: int) -> Iterator[None]:
    """Each turn is one step of a hand-written loop, which draws its samples in the cheapest way there is."""
    x, y = data.tensors
    for epoch in range(ENDLESS):
        mine = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        mine = mine[session.rank :: session.world_size]
        for first in range(0, len(mine) - batch + 1, batch):
            ids = mine[first : first + batch]
            optimizer.zero_grad(set_to_none=True)
            cross_entropy(model(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield


def block(steps: Iterator[None], count: int) -> tuple[float, float]:
    """Seconds by the clock and of this thread's processor time for each of ``count`` steps."""
    wall, used = time.perf_counter(), time.thread_time()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - wall) / count, (time.thread_time() - used) / count


def in_turn(loops: dict[str, Iterator[None]], alternations: int, count: int) -> dict[str, list[tuple[float, float]]]:
    """What each block of ``count`` steps took, by loop; each loop comes first as often as the others."""
    names = list(loops)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(alternations):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            taken[name].append(block(loops[name], count))
    return taken


def train(result: Path, width: int, batch: int, alternations: int, count: int, audit_every: int) -> None:
    data = prepared()
    with Session(device="cpu", checks=CheckOptions(audit_every=audit_every or None)) as session:
        model, optimizer = build(width)
        twins = deepcopy(model), deepcopy(model)
        wrapped = session.wrap(model, optimizer=optimizer)
        loops: dict[str, Iterator[None]] = {"session": session_steps(session, wrapped, optimizer, data, batch)}
        for name, twin in zip(("bare", "bare again"), twins, strict=True):
            bare = DistributedDataParallel(twin) if session.world_size > 1 else twin
            loops[name] = bare_steps(
                session, bare, torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9), data, batch
            )
        for steps in loops.values():
            block(steps, WARM_UP)
        taken = in_turn(loops, alternations, count)
        if session.is_rank0:
            result.write_text(json.dumps(taken))


if __name__ == "__main__":
    if sys.argv[1:2] == ["job"]:
        train(Path(sys.argv[2]), *map(int, sys.argv[3:8]))
    else:
        sys.exit(main())
