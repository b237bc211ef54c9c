"""ddp_script.py with four changes: survivors of a failure go on in place, newcomers join, checkpoints resume."""

import argparse
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic_trainer import Session


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


def train(arguments: argparse.Namespace, session: Session) -> None:
    """Which of two spirals is a point on?"""
    torch.manual_seed(0)
    data = spirals(4000)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = session.wrap(model, optimizer=optimizer)  # 2
    for epoch in session.epochs(arguments.epochs):
        for batch in session.batches(data, global_batch_size=64):  # 3
            with session.step() as step:  # 4
                loss = cross_entropy(model(batch.x), batch.y)
                optimizer.zero_grad()
                step.backward(loss)
                optimizer.step()
        print(f"epoch {epoch + 1} done", flush=True)
    with torch.no_grad():
        right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
    print(f"{right:.1%} of the points are on the right spiral", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default="runs/ddp", help="for checkpoints")
    options = parser.parse_args()
    with Session(checkpoint_dir=options.directory) as session:  # 1
        train(options, session)
