"""A script with a RunLog and trackers, whose processes are killed once their trackers have got some steps.

Arguments: the step at which this process kills itself (0: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.clock import Deadline
from elastic_trainer.jobs.reporting import RunLog

TRACKERS = ("wandb", "mlflow")
SAVED, STEPS = 6, 12
LIMIT_S = 80.0


def logged(step: int) -> bool:
    """Whether all trackers have got the losses up to ``step``."""
    paths = [Path("run", f"{name}.json") for name in TRACKERS]
    return all(path.exists() and json.loads(path.read_text())["steps"].get("train", 0) >= step for path in paths)


def await_logged(step: int) -> None:
    """On a slow machine trackers take long to begin."""
    deadline = Deadline.after(LIMIT_S)
    while not logged(step) and not deadline.expired:
        time.sleep(0.1)


fatal = int(sys.argv[1])
data = TensorDataset(torch.arange(48.0)[:, None] / 48, torch.ones(48, 1))
with Session(checkpoint_dir="checkpoints", seed=0) as session:
    torch.manual_seed(0)
    bare = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = session.wrap(bare, optimizer=optimizer)
    log = RunLog(session, "run", loggers=TRACKERS, config={"lr": 0.1})
    for batch in session.batches(data, global_batch_size=8, steps=STEPS):
        if session.step_number + 1 == fatal:
            await_logged(session.step_number)
            os.kill(os.getpid(), signal.SIGKILL)
        with session.step() as step:
            step.backward((model(batch.x) - batch.y).square().mean())
            optimizer.step()
        if step.committed:
            log.loss(step.loss)
        if session.step_number == SAVED:
            session.save(wait=True)
    await_logged(STEPS)
    log.evaluated({"error": 0.25})
    log.close()
    begun = session.resumed_from
Path(f"{os.environ['ELASTIC_TRAINER_NODE']}.resumed").write_text(str(begun))
