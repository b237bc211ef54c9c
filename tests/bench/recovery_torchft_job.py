"""The plain script's twin under torchft: the same model, batch, pause and lines, recovering as torchft does.

``recovery_torchft_job.py DIRECTORY LIGHTHOUSE [NAME=VALUE ...]`` writes ``time quorum rank world step pid`` for each
committed step to ``DIRECTORY/NODE-0.txt``. NAME=VALUE are seconds for torchft's Manager. A newcomer's first step has
rank -1, and all write a world without it: torchft heals it during that step, and counts its gradients from the next.
Runs in an environment of its own, with torch and torchft but without this project's dependencies.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper

STEP_S = 0.02
BATCH, LEAST = 16, 2


def run(directory: Path, lighthouse: str, waits: dict[str, timedelta]) -> None:
    torch.set_num_threads(1)
    node, pause = os.environ["ELASTIC_TRAINER_NODE"], threading.Event()
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1e-6)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=waits.get("timeout", timedelta(seconds=60))),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=LEAST,
        replica_id=node,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        **waits,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, plain)
    batch = torch.ones(BATCH, 1)
    with (directory / f"{node}-0.txt").open("a", buffering=1) as lines:
        while True:
            pause.wait(STEP_S)
            before = manager.current_step()
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                rank = manager.participating_rank()
                where = (manager._quorum_id, -1 if rank is None else rank, manager.num_participants())
                lines.write(f"{time.monotonic()} {' '.join(map(str, where))} {manager.current_step()} {os.getpid()}\n")


if __name__ == "__main__":
    said = dict(word.split("=", 1) for word in sys.argv[3:])
    run(Path(sys.argv[1]), sys.argv[2], {name: timedelta(seconds=float(value)) for name, value in said.items()})
