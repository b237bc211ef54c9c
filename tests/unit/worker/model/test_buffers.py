"""What a step's body does to buffers can be undone, however it does it."""

from __future__ import annotations

import torch
from torch import nn

from elastic_trainer.worker.model.replica import Buffers


class Averaging(nn.Module):
    """Buffers that are changed in place, replaced, filled for the first time and made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(2))
        self.late: torch.Tensor | None
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0).detach()
        self.late = x.detach()
        self.register_buffer("made", x.detach())
        out: torch.Tensor = self.norm(x)
        return out


def values(module: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in module.named_buffers()}


def test_buffers_are_the_same_tensors_with_the_same_values_again() -> None:
    """Also when other tensors came into their place in the step before."""
    module, x = Averaging(), torch.ones(4, 2)
    buffers = Buffers(module)
    for replaced in (None, "mean"):
        assert buffers.keep() == replaced
        before, tensors = values(module), dict(module.named_buffers())
        module(x)
        assert values(module) != before
        buffers.undo()
        assert values(module) == before
        assert all(tensors[name] is buffer for name, buffer in module.named_buffers())
        module(x)


def test_values_alone_can_be_put_back_between_micro_batches() -> None:
    module = nn.BatchNorm1d(2)
    buffers = Buffers(module)
    for _ in range(2):
        assert buffers.keep() is None
        before = values(module)
        module(torch.randn(4, 2))
        buffers.restore()
        assert values(module) == before
