"""The job of the step_overhead benchmark: a session's loop and two bare loops in the same processes, taking turns.

``step_overhead_job.py RESULT WIDTH BATCH ALTERNATIONS STEPS AUDIT_EVERY``: rank 0 writes what each block of steps took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.variables import ENV_LEDGER_DIR
from elastic_trainer.worker.steps.options import CheckOptions

FEATURES, CLASSES, SAMPLES, WARM_UP = 64, 10, 4096, 10
ENDLESS = 1_000_000


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


def run(result: Path, width: int, batch: int, alternations: int, count: int, audit_every: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop(ENV_LEDGER_DIR, None)  # the ledger is the local cluster's, not the session's
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(SAMPLES, FEATURES, generator=generator), torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    )
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
    run(Path(sys.argv[1]), *map(int, sys.argv[2:7]))
