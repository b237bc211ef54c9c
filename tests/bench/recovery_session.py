"""The plain script's twin with a session: the same steps and the same lines, recovering in place.

``recovery_session.py DIRECTORY`` writes ``time round rank world step pid`` for each step to ``DIRECTORY/NODE-0.txt``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.clock import pause
from elastic_trainer.variables import ENV_NODE

STEP_S = 0.02
SAMPLES, GLOBAL_BATCH, ENDLESS = 100_000, 48, 1_000_000


def run(directory: Path) -> None:
    torch.set_num_threads(1)
    node = os.environ[ENV_NODE]
    data = TensorDataset(torch.ones(SAMPLES, 1))
    with Session(device="cpu") as session, (directory / f"{node}-0.txt").open("a", buffering=1) as lines:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=GLOBAL_BATCH, epochs=ENDLESS):
            pause(STEP_S)
            with session.step() as step:
                step.backward(wrapped(batch.x).square().mean())
                optimizer.step()
            if step.committed:
                where = (session.round, session.rank, session.world_size, step.number, os.getpid())
                lines.write(f"{time.monotonic()} {' '.join(map(str, where))}\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
