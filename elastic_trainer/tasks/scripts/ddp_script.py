"""Plain DistributedDataParallel: when a rank dies, all start again. ddp_script_elastic.py is the same, in place."""

import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


def train(arguments: argparse.Namespace) -> None:
    """Which of two spirals is a point on?"""
    torch.manual_seed(0)
    data = spirals(4000)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
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
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()
