"""A small model with everything that a state consists of, and data for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import Step


def data(count: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def model(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


class Counter:
    """Something of the user's own to register."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(module(batch.x), batch.y)


def linear(session: Session, **options: Any) -> tuple[torch.optim.SGD, Any]:
    """An optimizer with the linear layer that it trains, wrapped."""
    module = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return optimizer, session.wrap(module, optimizer=optimizer, **options)


def steps(session: Session, optimizer: torch.optim.Optimizer, wrapped: Any, size: int, **length: Any) -> Iterator[Step]:
    """Train on batches of ``size`` samples; each step, when it has ended."""
    for batch in session.batches(data(), global_batch_size=size, **length):
        with session.step() as step:
            step.backward(loss_of(wrapped, batch))
            optimizer.step()
        yield step


class Job:
    def __init__(self, session: Session, *, lr: float = 0.01, dropout: float = 0.2) -> None:
        self.session, self.counter = session, Counter()
        self.module = model(dropout)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        session.register("counter", self.counter)
        self.wrapped = session.wrap(self.module, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, epochs: int, *, stop_at: int | None = None, size: int = 16) -> None:
        for batch in self.session.batches(data(), global_batch_size=size, epochs=epochs):
            if self.session.step_number == stop_at:
                return
            self.step(batch)
            self.counter.values.append(self.session.step_number)

    def step(self, batch: Any, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss) -> Step:
        with self.session.step() as step:
            step.backward(spoil(loss_of(self.wrapped, batch)))
            self.optimizer.step()
        return step

    def fingerprint(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.module.state_dict().values()]
