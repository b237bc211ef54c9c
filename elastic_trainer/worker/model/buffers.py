"""The buffers of a model at the start of a step, so that what its body does to them can be undone.

A forward pass may change them in place (BatchNorm) or replace them (``self.ema = ...``). A step that replaces none
costs one copy of all of them, and one look at each.

*Runs in* the worker's main thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_

import torch
from torch import nn

from elastic_trainer import torch_internals
from elastic_trainer.worker.comm.control import Control


class Buffers:
    """See the module. ``live`` are the model's tensors, ``kept`` their values at the step's start; the lists stay."""

    def __init__(self, module: nn.Module) -> None:
        owners = {name: torch_internals.buffers_of(each) for name, each in module.named_modules()}
        self._owners, self._tables = list(owners), list(owners.values())
        self._present: list[torch.Tensor | None] = []
        self._before: list[dict[str, torch.Tensor | None]] = []
        self.live: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self._renew(self._look())

    def keep(self) -> str | None:
        """At the start of a step; returns the name of a buffer that was replaced since the previous step, if any."""
        if not self._tables:
            return None
        present, replaced = self._look(), None
        if len(present) != len(self._present) or not all(map(is_, present, self._present)):
            replaced = self._replaced()
            self._renew(present)
        if self.live:
            torch._foreach_copy_(self.kept, self.live)
        return replaced

    def restore(self) -> None:
        """Put the kept values back into the tensors that the step began with."""
        if self.live:
            torch._foreach_copy_(self.live, self.kept)

    def undo(self) -> None:
        """Put back the tensors that the step began with, and their values."""
        for table, before in zip(self._tables, self._before, strict=True):
            table.clear()
            table.update(before)
        self.restore()

    def _look(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _replaced(self) -> str | None:
        for owner, now, then in zip(self._owners, self._tables, self._before, strict=True):
            for name in {**now, **then}:
                if now.get(name) is not then.get(name):
                    return f"{owner}.{name}" if owner else name
        return None

    def _renew(self, present: list[torch.Tensor | None]) -> None:
        self._present, self._before = present, [dict(table) for table in self._tables]
        once = {id(each): each for each in present if each is not None}.values()
        self.live[:] = [each.detach() if each.requires_grad else each for each in once]
        self.kept[:] = [torch.empty_like(each) for each in self.live]


def share(control: Control, buffers: Sequence[torch.Tensor]) -> None:
    """Give all ranks rank 0's ``buffers``, as DistributedDataParallel does; those that are saved."""
    if control.alone:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
    for alike in kinds.values():
        flat = torch.cat([each.reshape(-1) for each in alike]).cpu()
        control.broadcast(flat, 0)
        unflatten(flat, alike)


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what ``flat`` holds, one tensor behind another, into ``tensors``."""
    parts = torch.split(flat, [each.numel() for each in tensors])
    torch._foreach_copy_(list(tensors), [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)])
