"""Writes the gradients of every step of several small jobs: ``gradients.py OUTPUT``. One session after another."""

from __future__ import annotations

import sys
from pathlib import Path

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


def gradients(length: int, size: int, micro: int | None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    data = TensorDataset(torch.randn(length, 5, generator=generator), torch.randn(length, 1, generator=generator))
    found, losses = [], []
    with Session(device="cpu", seed=2) as session:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=size, micro_batch_size=micro, epochs=2):
            with session.step() as step:
                if batch.index % 2:
                    step.want_loss()  # found while the step goes on, and the same
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                found.append(torch.cat([grad.flatten() for grad in grads]))
                if session.world_size > 1:  # they lie where they were summed: nothing is copied back
                    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
                optimizer.step()
            losses.append(torch.tensor([step.loss or 0.0]))
    return found + losses


def counted(length: int, size: int, micro: int | None) -> list[torch.Tensor]:
    """As ``gradients``, where sample i has i % 4 items that count (of some samples none)."""
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(length, 5, generator=generator), torch.randn(length, 1, generator=generator)
    data = TensorDataset(x, y, (torch.arange(length) % 4).float().unsqueeze(1))
    found, losses = [], []
    with Session(device="cpu", seed=2) as session:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(data, global_batch_size=size, micro_batch_size=micro, epochs=1):
            items, expected = 0.0, torch.zeros(())
            with session.step() as step:
                if batch.index % 2:
                    step.want_loss()
                for part in step.micro_batches(batch):
                    count = part.data[2]
                    total = (count * (wrapped(part.x) - part.y) ** 2).sum()
                    step.backward(total, count=float(count.sum()))
                    if part.weight:
                        items, expected = items + float(count.sum()), expected + total.detach()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
                optimizer.step()
            sums = session.all_reduce(torch.tensor([float(expected), items], dtype=torch.float64))
            losses.append(torch.tensor([step.loss or 0.0]))
            torch.testing.assert_close(losses[-1].double(), sums[:1] / sums[1:], atol=1e-6, rtol=1e-5)
    return found + losses


def normalized(length: int, size: int) -> list[torch.Tensor]:
    """As ``gradients``, with batch normalization over the samples of all ranks; and what it keeps of them."""
    generator = torch.Generator().manual_seed(length)
    data = TensorDataset(torch.randn(length, 3, 5, generator=generator), torch.randn(length, 1, generator=generator))
    found: list[torch.Tensor] = []
    with Session(device="cpu", seed=2) as session:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(15, 7), nn.BatchNorm1d(7, affine=False))
        model.extend([nn.Tanh(), nn.Linear(7, 1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer, sync_batchnorm=True)
        for batch in session.batches(data, global_batch_size=size, epochs=2):
            with session.step() as step:
                step.backward(nn.functional.mse_loss(wrapped(batch.x), batch.y))
                found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
                optimizer.step()
        found += [buffer.float() for buffer in model.buffers()]
    return found


def averaged(length: int, size: int, micro: int | None) -> list[torch.Tensor]:
    """Parameters behind every step, where ranks average them after each step instead of gradients before it."""
    generator = torch.Generator().manual_seed(length)
    data = TensorDataset(torch.randn(length, 5, generator=generator), torch.randn(length, 1, generator=generator))
    found = []
    with Session(device="cpu", seed=2) as session:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        wrapped = session.wrap(model, optimizer=optimizer, reduction="local_sgd", sync_every=1)
        for batch in session.batches(data, global_batch_size=size, micro_batch_size=micro, epochs=2):
            with session.step() as step:
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
                optimizer.step()
            found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    return found


def main() -> None:
    torch.set_num_threads(1)
    results = [gradients(*case) for case in CASES] + [counted(*case) for case in CASES[:3]]
    results += [averaged(*case) for case in CASES]
    results += [normalized(40, 16), normalized(29, 14), normalized(9, 4)]  # the last with tails smaller than the ranks
    with Session(device="cpu") as session:
        torch.save(results, Path(sys.argv[1]) / f"gradients-{session.world_size}-{session.rank}.pt")


if __name__ == "__main__":
    main()
