"""Batch normalization over several ranks is that of one process with all their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model.replica import SharedBatchNorm, SyncContext, share_batchnorm
from tests.unit.worker.ranks import run_ranks

SIZES = [5, 1, 3]
"""Samples of each rank."""


def layer(**options: Any) -> nn.BatchNorm2d:
    module = nn.BatchNorm2d(4, **options)
    with torch.no_grad():
        if module.affine:
            module.weight.copy_(torch.tensor([0.5, 1.0, 2.0, -1.0]))
            module.bias.copy_(torch.arange(4.0))
    return module


def samples() -> torch.Tensor:
    return torch.randn(sum(SIZES), 4, 3, 2, generator=torch.Generator().manual_seed(1)) * 3 + 100


def shared(control: Control, module: nn.BatchNorm2d, *, counts: bool = True) -> SharedBatchNorm:
    context = SyncContext()
    context.bind(control.rank, control.world_size, lambda tensor: control.group.allreduce([tensor]).wait())
    context.counts = counts
    result = share_batchnorm(module, context)
    assert isinstance(result, SharedBatchNorm)
    return result


def on_each_rank(body: Callable[[Control, torch.Tensor], Any]) -> list[Any]:
    """``body(control, samples)`` on a rank for each part of the samples."""
    parts = torch.split(samples(), SIZES)
    return run_ranks(len(SIZES), lambda control: body(control, parts[control.rank]))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_outputs_gradients_and_statistics_are_those_of_one_process(options: dict[str, Any]) -> None:
    """With unequally many samples, whose mean is far from zero."""
    alone, x = layer(**options), samples().requires_grad_()
    wanted = alone(x)
    wanted.square().mul(torch.arange(4.0).view(1, 4, 1, 1)).sum().backward()

    def body(control: Control, part: torch.Tensor) -> Any:
        mine, module = part.clone().requires_grad_(), shared(control, layer(**options))
        out = module(mine)
        out.square().mul(torch.arange(4.0).view(1, 4, 1, 1)).sum().backward()
        return out, mine.grad, [p.grad for p in module.parameters()], dict(module.named_buffers())

    results = on_each_rank(body)
    assert torch.allclose(torch.cat([out for out, *_ in results]), wanted, atol=1e-4)
    assert x.grad is not None
    assert torch.allclose(torch.cat([grad for _, grad, *_ in results]), x.grad, atol=1e-4)
    for number, parameter in enumerate(alone.parameters()):
        assert parameter.grad is not None
        assert torch.allclose(sum(grads[number] for _, _, grads, _ in results), parameter.grad, rtol=1e-4, atol=1e-3)
    for *_, buffers in results:
        assert buffers.keys() == dict(alone.named_buffers()).keys()
        for name, value in alone.named_buffers():
            assert torch.allclose(buffers[name].float(), value.float(), rtol=1e-5), name


def test_a_filler_has_no_part_in_the_statistics() -> None:
    """A rank without samples of its own normalizes like the others, and neither moves nor is moved by them."""
    parts = torch.split(samples(), SIZES)
    alone = layer()
    alone(torch.cat([parts[0], parts[2]]))

    def body(control: Control, part: torch.Tensor) -> Any:
        counts = control.rank != 1
        mine, module = part.clone().requires_grad_(), shared(control, layer(), counts=counts)
        (module(mine).square().sum() * float(counts)).backward()
        return module.running_mean, module.running_var, mine.grad

    for mean, variance, _ in (results := on_each_rank(body)):
        assert torch.allclose(mean, alone.running_mean)  # type: ignore[arg-type]
        assert torch.allclose(variance, alone.running_var)  # type: ignore[arg-type]
    assert not results[1][2].any()


def test_sixteen_bits_are_normalized_in_thirty_two() -> None:
    """As torch does: the statistics of bfloat16 samples around 100 are right to three digits."""

    def body(control: Control, part: torch.Tensor) -> Any:
        module = shared(control, layer(affine=False))
        out = module(part.to(torch.bfloat16))
        assert out.dtype is torch.bfloat16
        return out

    joined = torch.cat(on_each_rank(body)).float()
    assert joined.mean().abs() < 0.02
    assert abs(float(joined.var(correction=0)) - 1) < 0.02


def refuse(tensor: torch.Tensor) -> None:
    raise AssertionError("a collective in evaluation")


def test_alone_and_in_evaluation_it_is_torchs_own() -> None:
    """Bit by bit, without other ranks, which may have fewer batches; a single value per channel is not an error."""
    context = SyncContext()
    context.bind(0, 3, refuse)
    for options in ({}, {"track_running_stats": False}):
        evaluating = share_batchnorm(layer(**options), context).eval()
        assert torch.equal(evaluating(samples()), layer(**options).eval()(samples()))
    module, x = layer(), samples()
    mine = share_batchnorm(nn.Sequential(layer()), SyncContext())[0]  # type: ignore[index]
    assert torch.equal(mine(x), module(x))
    assert torch.equal(mine.eval()(x), module.eval()(x))
    one = SharedBatchNorm(4)
    one.context = SyncContext()
    assert (one(torch.randn(1, 4)) == 0).all()
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        one(torch.randn(4))
