"""A training script of your own around a Session: digits, a small CNN, 97 % after five epochs.

elastic-trainer local --nodes 1:3 --start 2 --recovery in_place --kill-worker-at 20 --join-at 40 -- script --epochs 20
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.jobs.digits import Digits, shipped_digits, split


def network() -> nn.Module:
    """(n, 1, 28, 28) images to (n, 10) scores."""
    convolutions = [nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5, padding=2)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def tensors(digits: Digits) -> TensorDataset:
    """Pairs of a (1, 28, 28) image and its label."""
    return TensorDataset(torch.tensor(digits.images)[:, None] / 255, torch.tensor(digits.labels).long())


def hits(model: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
    """A sum and a count, not a mean: exact, however the test data is divided over the ranks."""
    return {"accuracy": ((model(batch.x).argmax(1) == batch.y).sum(), len(batch.y))}


parser = argparse.ArgumentParser()
parser.add_argument("--directory", default="runs/script", help="checkpoints; started again, the job resumes there")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--bf16", action="store_true", help="fp16 needs session.wrap(..., scaler=torch.amp.GradScaler())")
arguments = parser.parse_args()

train, test = map(tensors, split(shipped_digits(), test_size=1000, seed=0))
with Session(checkpoint_dir=arguments.directory, seed=0, checkpoint_every_s=10) as session:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model = session.wrap(model, optimizer=optimizer)  # on the device, resumed or healed, averaged over all ranks
    for epoch in session.epochs(arguments.epochs):
        for batch in session.batches(train, global_batch_size=64):  # this rank's part, at any number of ranks
            with session.step() as step:  # if a rank dies in here, the others do this batch again
                with torch.autocast(session.device.type, torch.bfloat16, enabled=arguments.bf16):
                    loss = cross_entropy(model(batch.x), batch.y)
                step.backward(loss)  # weighted by this rank's share of the batch
                optimizer.step()
        result = session.evaluate(model, test, 250, hits)
        if session.is_rank0:
            print(f"epoch {epoch + 1}: {result['accuracy']:.1%} on {session.world_size} ranks", flush=True)
