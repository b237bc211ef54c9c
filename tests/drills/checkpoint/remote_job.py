"""A training whose checkpoints lie at a URL: ``python -m tests.drills.checkpoint.remote_job URL STEPS SAVE_EVERY``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.checkpoint import Event
from elastic_trainer.worker.steps.options import SavingOptions

BATCH = 8
WIDTH = 2500
"""Parameters and momentum are two parts and a bit."""


def train(
    url: str | None,
    steps: int,
    save_every: int,
    after: Callable[[Session, int], None] = lambda session, step: None,
    on_event: Callable[[Event], None] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Train up to ``steps``, resuming from ``url``; the steps committed here, and all parameters at the end."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, WIDTH), torch.randn(64, 1000))
    done: list[int] = []
    with Session(url, 3, "cpu", save_every, None, keep_last=100, saving=SavingOptions(on_event=on_event)) as session:
        torch.manual_seed(1)
        model = torch.nn.Linear(WIDTH, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=BATCH, epochs=steps * BATCH // len(data)):
            with session.step() as step:
                step.backward(torch.nn.functional.mse_loss(wrapped(batch.x), batch.y))
                optimizer.step()
            done.append(step.number)
            print(step.number, flush=True)
            after(session, step.number)
        parameters = torch.cat([each.detach().reshape(-1).clone() for each in model.parameters()])
    return done, parameters


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
