"""ddp_script.py with four changes: survivors of a failure go on in place, newcomers join, checkpoints resume."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic_trainer import Session


def train(arguments: argparse.Namespace, session: Session) -> None:
    """Digits of 8 x 8 pixels, and a network of one hidden layer."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
    print(f"{right:.1%} of the digits are read right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--directory", default="runs/ddp", help="for checkpoints")
    options = parser.parse_args()
    with Session(checkpoint_dir=options.directory) as session:  # 1
        train(options, session)
