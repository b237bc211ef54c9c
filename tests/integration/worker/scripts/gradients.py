"""Writes what several small jobs compute: ``gradients.py OUTPUT WHAT``, one session after another.

WHAT is ``gradients`` (of every step) or ``bitwise`` (all that must have equal bits with reduction='tree').
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer import Session

CASES: list[tuple[int, int, int | None]] = [
    (40, 16, None),  # a tail of 8
    (37, 12, 4),  # accumulation, and a tail of one sample
    (10, 4, 4),  # fewer micro-batches than ranks
    (5, 2, None),  # fewer samples than ranks
    (29, 14, 3),  # uneven micro-batches
]
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    # Sample i has i % 4 items that count (some samples have none); and gradients are summed in several buckets.
    "counted": {"ddp_options": {"bucket_cap_mb": 1e-5}},
    "averaged": {"reduction": "local_sgd", "sync_every": 1},  # parameters are averaged behind each step
    "normalized": {"sync_batchnorm": True},  # over the samples of all ranks
}


def network(kind: str) -> nn.Sequential:
    if kind != "normalized":
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    layers = (nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(15, 7), nn.BatchNorm1d(7, affine=False))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(7, 1))


def trained(kind: str, length: int, size: int, micro: int | None = None) -> list[torch.Tensor]:
    """Gradients (of ``averaged`` the parameters behind the step) and loss of each step, then all buffers."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(length, *([3] if kind == "normalized" else []), 5, generator=generator)
    items = (torch.arange(length) % 4).float().unsqueeze(1)
    data = TensorDataset(x, torch.randn(length, 1, generator=generator), items)
    found = []
    with Session(device="cpu", seed=2) as session:
        model = network(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer, **OPTIONS[kind])
        for batch in session.batches(data, global_batch_size=size, micro_batch_size=micro, epochs=2):
            total = torch.zeros(2, dtype=torch.float64)
            with session.step() as step:
                if batch.index % 2 and kind in ("mean", "counted"):
                    step.want_loss()  # found while the step goes on, and the same
                for part in step.micro_batches(batch):
                    error = (wrapped(part.x) - part.y) ** 2
                    if kind != "counted":
                        step.backward(error.mean())
                        continue
                    weighed, count = (part.data[2] * error).sum(), part.data[2].sum()
                    step.backward(weighed, count=float(count))
                    if part.weight:
                        total += torch.stack([weighed.detach(), count]).double()
                grads = [each.grad for each in model.parameters() if each.grad is not None]
                if kind == "mean" and session.world_size > 1:  # where they were summed: nothing is copied back
                    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
                if kind != "averaged":
                    found.append(torch.cat([grad.flatten() for grad in grads]))
                optimizer.step()
            if kind == "averaged":
                found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
            elif kind != "normalized":
                found.append(torch.tensor([step.loss or 0.0]))
            if kind == "counted":
                weighed, count = session.all_reduce(total)
                torch.testing.assert_close(found[-1][0].double(), weighed / count, atol=1e-6, rtol=1e-5)
        return found + [buffer.float() for buffer in model.buffers()]


EXACT: list[tuple[str, int, int, int]] = [
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


def exact(kind: str, length: int, size: int, micro: int) -> dict[str, Any]:
    """All of a job with the tree that must have equal bits."""
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


def main(output: str, what: str) -> None:
    torch.set_num_threads(1)
    jobs: list[tuple[Any, ...]] = [("mean", *case) for case in CASES] + [("counted", *case) for case in CASES[:3]]
    jobs += [("averaged", *case) for case in CASES]
    jobs += [("normalized", *case) for case in ((40, 16), (29, 14), (9, 4))]  # the last with tails below the ranks
    results: list[Any] = [exact(*case) for case in EXACT] if what == "bitwise" else [trained(*job) for job in jobs]
    with Session(device="cpu") as session:
        torch.save(results, Path(output) / f"{what}-{session.world_size}-{session.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
