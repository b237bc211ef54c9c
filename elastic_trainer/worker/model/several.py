"""The replica of several models, or of a model with several optimizers: GANs, actor and critic, Muon beside AdamW.

A step has several backward passes there, each through some of the parameters, and models are called in any number and
order between them. So nothing is read from forward passes: after each backward pass the gradients that it has changed
on any rank are summed, and added to those there were. They are the global batch's whenever the script looks at them.

The price beside DistributedDataParallel: sums do not overlap with the pass, and the gradients of a model that a pass
only runs through are summed too, unless it is frozen for that time (``requires_grad_(False)``).

*Runs in* the worker's main thread.
*Fails by* ConfigError for gradients that cannot be summed, RoundBrokenError when the round is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.groups import all_reduce
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model.replica import Pass, Replica, Use, bare, by_kind, share, unflatten

BUCKET_BYTES = 32 * 2**20
"""Gradients that are summed in one collective."""


def together(models: Mapping[str, nn.Module]) -> nn.ModuleDict:
    """``models`` as one, whose parameters have the model's name in front of theirs."""
    if not models:
        raise ConfigError("model is an empty dictionary", hint="give at least one")
    try:
        return nn.ModuleDict({name: bare(each) for name, each in models.items()})
    except KeyError as error:
        raise ConfigError(f"a model cannot have that name: {error.args[0]}", hint="give it another one") from error


class MultiOptimizerReplica(Replica):
    """See the module. ``module`` holds all models."""

    refused: Mapping[Use, tuple[str, str]] = {
        Use.CLOSURE: (
            "one of several optimizers does not go with a closure",
            "call its step() after step.backward(loss)",
        ),
        Use.MANUAL_STEP: ("begin_step() with several models or optimizers", "use `with session.step()`"),
        Use.AUDIT: ("audit_every does not go with several models or optimizers", "leave it out"),
    }

    def __init__(self, module: nn.Module, placement: Placement, *, in_place: bool = False) -> None:
        super().__init__(module, placement, in_place=in_place)
        self._control = Control()
        self._parameters = list(self.module.parameters())
        self._summed: list[torch.Tensor | None] = []
        """Gradients from before a pass, by parameter; empty outside of passes and between accumulated ones."""
        self._accumulates = False

    def bind(self, control: Control) -> None:
        super().bind(control)
        self._control, self.share = control, 1.0 / control.world_size

    def begin_step(self, *, counts: bool = True) -> None:
        super().begin_step(counts=counts)
        self._summed, self._accumulates = [], False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, loss: torch.Tensor, about: Pass | None = None) -> float | None:
        if self._control.alone:
            return super().backward(loss)
        if not self._summed:
            self._summed = [each.grad for each in self._parameters]
            for each in self._parameters:
                each.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._accumulates:
            self._sum()
        return None

    def _sum(self) -> None:
        """Sum what the pass has added, and put it to what there was."""
        before, self._summed = self._summed, []
        here = [float(each.grad is not None) for each in self._parameters]
        flags = torch.tensor(here, device=self._placement.device)
        all_reduce(self._control, flags)
        touched = [each for each, flag in zip(self._parameters, flags.tolist(), strict=True) if flag]
        for each in touched:  # those that have a gradient of this pass on any rank
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            elif each.grad.is_sparse:
                raise ConfigError(
                    "a parameter has sparse gradients, which several optimizers do not go with",
                    hint="make the embedding with sparse=False",
                )
        with torch.no_grad():
            add_up(self._control, [each.grad for each in touched if each.grad is not None])
            for each, there in zip(self._parameters, before, strict=True):
                if there is not None:
                    each.grad = there if each.grad is None else there.add_(each.grad)

    def scale_gradients(self, factor: float) -> None:
        raise ConfigError(
            "backward(loss, count) with several models or optimizers, whose passes have no common count",
            hint="divide the loss by the count of the global batch: session.all_reduce() adds it up",
        )

    def share_buffers(self) -> None:
        share(self._control, list(self.module.buffers()))

    def align_buffers(self, control: Control, average: nn.Module | None) -> None:
        self.share_buffers()
        if average is not None:
            share(control, list(average.buffers()))


def add_up(control: Control, tensors: Sequence[torch.Tensor]) -> None:
    """Sum ``tensors`` over the ranks; all of them change when all sums have arrived."""
    flat = [(bucket, torch.cat([each.reshape(-1) for each in bucket])) for bucket in buckets(tensors)]
    all_reduce(control, *(sums for _, sums in flat))
    for bucket, sums in flat:
        unflatten(sums, bucket)


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``tensors`` in groups of one type, each of at most ``BUCKET_BYTES`` if it has more than one."""
    for alike in by_kind(tensors):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
