"""Learns a line from points of which one is far off; ``tree`` gives equal bits at any number of ranks."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer import Session

POISON = 1234

if __name__ == "__main__":
    directory, reduction, epochs = sys.argv[1:4]
    torch.manual_seed(0)
    x = torch.randn(2000, 16)
    y = x @ torch.randn(16, 1) + 0.1 * torch.randn(2000, 1)
    y[POISON] = 500.0
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(Path(directory), checkpoint_every_steps=50, keep_last=20) as session:
        net = session.wrap(model, optimizer=optimizer, reduction=reduction)
        data = TensorDataset(x, y)
        for _ in session.batches(data, global_batch_size=32, micro_batch_size=4, epochs=int(epochs)):
            with session.step() as step:
                for part in step.micro_batches():
                    step.backward(nn.functional.mse_loss(net(part.x), part.y))
                step.clip(50.0)
                optimizer.step()
            if step.committed and reduction == "ddp":
                step.loss  # noqa: B018  # all ranks ask for it, so that the ledger has it
