"""ddp_script.py with a Session: survivors of a failure go on in place, newcomers join, checkpoints resume."""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from elastic_trainer import Session


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


def train(options: argparse.Namespace, session: Session) -> None:
    """Which of two spirals is a point on?"""
    torch.manual_seed(0)
    data = spirals(4000)
    device = session.device
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.epochs * 63)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    model = session.wrap(model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)  # 2
    for epoch in session.epochs(options.epochs):
        for batch in session.batches(data, global_batch_size=64, passes=2):  # 3
            with session.step() as step:  # 4
                for part in step.micro_batches(batch):
                    with torch.autocast(device.type):
                        loss = cross_entropy(model(part.x), part.y)
                    step.backward(loss)
                step.clip(1.0)
                optimizer.step()
        print(f"epoch {epoch + 1} done", flush=True)
    with torch.no_grad():
        right = (model(data.tensors[0].to(device)).argmax(1).cpu() == data.tensors[1]).float().mean()
    print(f"{right:.1%} of the points are on the right spiral", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default="runs/ddp", help="for checkpoints")
    arguments = parser.parse_args()
    with Session(checkpoint_dir=arguments.directory) as session:  # 1
        train(arguments, session)
