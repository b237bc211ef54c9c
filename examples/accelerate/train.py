"""Accelerate's loop, which trains on when nodes die: which of two spirals is a point on?

elastic-trainer local --nodes 2:3 --recovery in_place --kill-node-at 50 -- examples/accelerate/train.py
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastic_trainer import Session
from elastic_trainer.integrations.accelerate import ElasticAccelerator

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--directory", default="runs/accelerate", help="checkpoints; started again, the job resumes there")
options = parser.parse_args()


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count, generator=torch.Generator().manual_seed(count)))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


train = spirals(2000)
with Session(checkpoint_dir=options.directory, seed=0) as session:
    accelerator = ElasticAccelerator(session, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * 63)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in session.epochs(options.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1} done on {session.world_size} ranks", flush=True)
    with torch.no_grad():
        right = (model(train.tensors[0].to(session.device)).argmax(1).cpu() == train.tensors[1]).float().mean()
    accelerator.print(f"{right:.1%} of the points are on the right spiral", flush=True)
