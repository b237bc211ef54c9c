"""Batch normalization over all ranks' samples on devices that torch's own SyncBatchNorm does not support.

Each rank contributes mean, variance and count; they are combined as in Chan, Golub and LeVeque (1979), so no precision
is lost by subtracting large squares. Ranks may have different numbers of samples; a filler's do not count.

*Runs in* the worker's main thread, forward and backward.
*Fails by* RoundBrokenError when the round is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic_trainer.torch_internals import BatchNorm

Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""


class Company:
    """The ranks of the present round, for all layers of a model. ``counts``: the present samples are no filler."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.counts = True
        self.reduce: Reduce = lambda tensor: None

    def bind(self, rank: int, world_size: int, reduce: Reduce) -> None:
        self.rank, self.world_size, self.reduce = rank, world_size, reduce
        self.counts = True


class SharedBatchNorm(BatchNorm):
    """As nn.BatchNorm1d, 2d or 3d, over the samples of all ranks while training. Input: (N, C, ...).

    A single value per channel, as the last batch of an epoch may have, is not an error: its variance is 0.
    """

    company: Company

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        alone = self.company.world_size == 1 and input.numel() > input.shape[1]
        if alone or not self.training:  # in evaluation ranks have different numbers of batches
            return super().forward(input)
        output: torch.Tensor
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.company)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._move(mean, variance, float(count))
        return output

    @torch.no_grad()
    def _move(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)


class _Normalize(torch.autograd.Function):
    """Statistics of all ranks; the backward pass sums over all ranks again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, company: Company) -> Any:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        axes = [axis for axis in range(x.dim()) if axis != 1]
        mean, variance, count = _joined(wide, axes, company)
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        output = normal
        if weight is not None:
            output = normal * weight.view(shape).to(wide.dtype) + bias.view(shape).to(wide.dtype)
        ctx.save_for_backward(normal, scale, weight)
        ctx.company, ctx.axes, ctx.shape, ctx.count, ctx.counts = company, axes, shape, count, company.counts
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, scale, weight = ctx.saved_tensors
        shape, axes = ctx.shape, ctx.axes
        wide = grad.to(normal.dtype)
        total, along = wide.sum(axes), (wide * normal).sum(axes)
        of_all = torch.cat([total, along])
        ctx.company.reduce(of_all)
        mean_total, mean_along = (of_all / ctx.count).chunk(2)
        back = wide
        if ctx.counts:  # a filler has no part in the statistics
            back = wide - mean_total.view(shape) - normal * mean_along.view(shape)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        weights = (along.to(weight.dtype), total.to(weight.dtype)) if weight is not None else (None, None)
        return (back * factor.view(shape)).to(grad.dtype), *weights, None, None


def _joined(x: torch.Tensor, axes: list[int], company: Company) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and (biased) variance per channel over all ranks, and the number of values."""
    channels = x.shape[1]
    stats = x.new_zeros(company.world_size, 2 * channels + 1)
    if company.counts and x.numel():
        variance, mean = torch.var_mean(x, axes, correction=0)
        stats[company.rank] = torch.cat([mean, variance, x.new_tensor([x.numel() / channels])])
    company.reduce(stats)
    means, variances, counts = stats[:, :channels], stats[:, channels:-1], stats[:, -1:]
    count = counts.sum().clamp_(min=1.0)
    mean = (counts * means).sum(0) / count
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return mean, variance, count


def share_batchnorm(module: nn.Module, company: Company) -> nn.Module:
    """``module`` with every layer of batch normalization over all ranks; parameters, buffers and names stay."""
    if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        shared = SharedBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        shared.weight, shared.bias = module.weight, module.bias
        shared.running_mean, shared.running_var = module.running_mean, module.running_var
        shared.num_batches_tracked = module.num_batches_tracked
        shared.training = module.training
        shared.company = company
        return shared
    for name, child in module.named_children():
        module.add_module(name, share_batchnorm(child, company))
    return module
