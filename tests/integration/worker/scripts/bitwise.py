"""Trains several small jobs with reduction='tree' and writes all that must have equal bits: ``bitwise.py OUTPUT``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer import Session

CASES: list[tuple[str, int, int, int]] = [
    ("sgd", 40, 16, 4),  # a tail of 8
    ("adamw", 37, 12, 4),  # a tail of one sample
    ("adamw", 29, 14, 3),  # uneven micro-batches, no power of two of them
    ("sgd", 10, 4, 2),  # fewer micro-batches than ranks
]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.main, self.rare, self.never = nn.Linear(64, 3), nn.Linear(64, 3), nn.Linear(64, 3)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1)
        out: torch.Tensor = self.main(hidden) * self.scale
        return out + self.rare(hidden) if float(x.sum()) > 3 else out


def trained(kind: str, length: int, size: int, micro: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    data = TensorDataset(torch.randn(length, 1, 4, 4, generator=generator), torch.arange(length) % 3)
    losses = []
    with Session(device="cpu", seed=2) as session:
        model = Branching().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if kind == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped = session.wrap(model, optimizer=optimizer, reduction="tree", average=0.9)
        counted = kind == "adamw"
        for batch in session.batches(data, global_batch_size=size, micro_batch_size=micro, epochs=2):
            with session.step() as step:
                for part in step.micro_batches(batch):
                    out = wrapped(part.x)
                    if counted:  # every sample counts as many times as its class says
                        each = nn.functional.cross_entropy(out, part.y, reduction="none") * part.y
                        step.backward(each.sum(), count=float(part.y.sum()))
                    else:
                        step.backward(nn.functional.cross_entropy(out, part.y))
                step.clip(0.1)
                optimizer.step()
            losses.append(step.loss)

        def measure(module: nn.Module, part: Any) -> dict[str, tuple[Any, Any]]:
            out = module(part.x)
            return {"loss": (nn.functional.cross_entropy(out, part.y, reduction="sum"), len(part))}

        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "average": session.average.state_dict(),
            "losses": losses,
            "loss": session.evaluate(wrapped, data, 6, measure)["loss"],
            "predicted": session.predict(wrapped, data, 6, lambda module, part: module(part.x)),
        }


def main() -> None:
    torch.set_num_threads(1)
    results = [trained(*case) for case in CASES]
    with Session(device="cpu") as session:
        torch.save(results, Path(sys.argv[1]) / f"bitwise-{session.world_size}-{session.rank}.pt")


if __name__ == "__main__":
    main()
