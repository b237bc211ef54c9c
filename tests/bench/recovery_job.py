"""The plain script's twins of the recovery benchmark: the same pause and the same lines, recovering in place.

``recovery_job.py session DIRECTORY`` and ``recovery_job.py torchft DIRECTORY LIGHTHOUSE [NAME=VALUE ...]`` write
``time round rank world step pid`` for each committed step to ``DIRECTORY/NODE-0.txt``. NAME=VALUE are seconds for
torchft's Manager; its round is the quorum. Its newcomer's first step has rank -1, and all write a world without it:
torchft heals it during that step, and counts its gradients from the next. It has an environment of its own, without
this project's dependencies.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

STEP_S = 0.02
SAMPLES, GLOBAL_BATCH, ENDLESS = 100_000, 48, 1_000_000
BATCH, LEAST = 16, 2


def session() -> Iterator[tuple[object, ...]]:
    """Train until somebody ends it; round, rank, world and step of each step that counts."""
    from elastic_trainer import Session

    data, pause = TensorDataset(torch.ones(SAMPLES, 1)), threading.Event()
    with Session(device="cpu") as session:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=GLOBAL_BATCH, epochs=ENDLESS):
            pause.wait(STEP_S)
            with session.step() as step:
                step.backward(wrapped(batch.x).square().mean())
                optimizer.step()
            if step.committed:
                yield session.round, session.rank, session.world_size, step.number


def torchft(lighthouse: str, *words: str) -> Iterator[tuple[object, ...]]:
    """The same under torchft's manager."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel
    from torchft.optim import OptimizerWrapper

    waits = {name: timedelta(seconds=float(value)) for name, value in (word.split("=", 1) for word in words)}
    model, pause = torch.nn.Linear(1, 1), threading.Event()
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=waits.get("timeout", timedelta(seconds=60))),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=LEAST,
        replica_id=os.environ["ELASTIC_TRAINER_NODE"],
        lighthouse_addr=lighthouse,
        hostname="localhost",
        **waits,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, plain)
    batch = torch.ones(BATCH, 1)
    while True:
        pause.wait(STEP_S)
        before = manager.current_step()
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            rank = manager.participating_rank()
            world = manager.num_participants()
            yield manager._quorum_id, -1 if rank is None else rank, world, manager.current_step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[2], f"{os.environ['ELASTIC_TRAINER_NODE']}-0.txt")
    with path.open("a", buffering=1) as lines:
        for where in session() if sys.argv[1] == "session" else torchft(*sys.argv[3:]):
            lines.write(f"{time.monotonic()} {' '.join(map(str, where))} {os.getpid()}\n")
