"""A DDP script as people have them: when a rank dies, all start again. ddp_script_elastic.py is the same, in place."""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, (count, 2), and the number of each one's spiral."""
    spiral = torch.arange(count) % 2
    turn = math.pi * (0.5 + 2 * torch.rand(count))
    angle = turn + math.pi * spiral
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 8, spiral)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Which of two spirals is a point on?"""
    torch.manual_seed(0)
    data = spirals(4000)
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.epochs * 63)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32 // dist.get_world_size(), sampler=sampler)
    checkpoint = os.path.join(options.directory, "last.pt")
    start = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        start = state["epoch"]
    for epoch in range(start, options.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            with torch.autocast(device.type):
                loss = cross_entropy(model(x.to(device)), y.to(device))
            scaler.scale(loss / 2).backward()
            if number % 2 == 0 or number == len(loader):  # accumulated over two batches
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            os.makedirs(options.directory, exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state | {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}, checkpoint)
        print(f"epoch {epoch + 1} done", flush=True)
    with torch.no_grad():
        right = (model(data.tensors[0].to(device)).argmax(1).cpu() == data.tensors[1]).float().mean()
    print(f"{right:.1%} of the points are on the right spiral", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default="runs/ddp", help="for checkpoints")
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    train(parser.parse_args(), torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu"))
    dist.destroy_process_group()
