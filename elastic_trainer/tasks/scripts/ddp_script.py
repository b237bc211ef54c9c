"""Plain DistributedDataParallel: when a rank dies, all start again. ddp_script_elastic.py is the same, in place."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(arguments: argparse.Namespace) -> None:
    """Digits of 8 x 8 pixels, and a network of one hidden layer."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
    print(f"{right:.1%} of the digits are read right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default="runs/ddp", help="for checkpoints")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()
