"""The moving average of a sharded model's parameters, kept as shards: FSDP modules cannot be copied.

*Runs in* the worker's main thread. *Owns* one shard of averaged parameters.
*Invariant*: the live parameters hold averaged values during a forward pass of :attr:`ShardedAverage.module` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel

from elastic_trainer.worker.comm.lasting import local


class _Averaged(nn.Module):
    """The live module, computing with the averaged parameters; without gradients."""

    def __init__(self, live: nn.Module, averaged: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.live = live
        self._averaged = dict(averaged)

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self._in_place():
            return self.live(*inputs, **named)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._reshard()
        held = [local(each.detach()) for each in self.live.parameters()]
        own = [each.clone() for each in held]
        torch._foreach_copy_(held, [local(each) for each in self._averaged.values()])
        try:
            yield
        finally:
            self._reshard()
            torch._foreach_copy_(held, own)

    def _reshard(self) -> None:
        for each in self.live.modules():
            if isinstance(each, FSDPModule):
                each.reshard()

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: self._averaged.get(name, each) for name, each in self.live.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        for name, each in self._averaged.items():
            each.copy_(state_dict[name])


class ShardedAverage(AveragedModel):
    """As torch's AveragedModel with an exponential average of this ``decay``, and with its state dict."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)
        self._decay = decay
        self._pairs = [(each.detach().clone(), each) for each in module.parameters()]
        names = [name for name, _ in module.named_parameters()]
        self.module = _Averaged(module, dict(zip(names, [mine for mine, _ in self._pairs], strict=True)))
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        mine = [local(each) for each, _ in self._pairs]
        present = [local(each.detach()) for _, each in self._pairs]
        if self.n_averaged == 0:
            torch._foreach_copy_(mine, present)
        else:
            torch._foreach_lerp_(mine, present, 1.0 - self._decay)
        self.n_averaged += 1

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        inner = {f"module.{name}": each for name, each in self.module.state_dict().items()}
        return {"n_averaged": self.n_averaged, **inner}

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        self.module.load_state_dict({name.removeprefix("module."): each for name, each in state_dict.items()})
        self.n_averaged.copy_(state_dict["n_averaged"])
