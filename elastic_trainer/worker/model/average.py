"""Running averages of a model's parameters, as torch's own AveragedModel keeps them.

*Runs in* the worker's main thread. *Fails by* ConfigError for a decay that is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_trainer.checkpoint.codec import local
from elastic_trainer.errors import ConfigError


def averaged(module: nn.Module, wanted: float | AveragedModel | None) -> AveragedModel | None:
    """The average to keep of ``module``: one with this decay, the given one, or none.

    With decay d, averaged parameters become d * averaged + (1 - d) * present at each step, from those of the first step
    on; a step that a GradScaler skipped counts too. Buffers are the present ones.
    """
    if wanted is None:
        return None
    if isinstance(wanted, AveragedModel):
        return wanted.to(next(module.parameters()).device)
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(checked_decay(wanted)))  # type: ignore[no-untyped-call]


def checked_decay(wanted: float | AveragedModel) -> float:
    """ConfigError for what is no decay."""
    if isinstance(wanted, AveragedModel):
        raise ConfigError("an AveragedModel of a sharded model", hint="give a decay, such as average=0.999")
    if not 0.0 < wanted < 1.0:
        raise ConfigError(f"average is {wanted:g}", hint="give a decay between 0 and 1, such as 0.999")
    return wanted


class _Averaged(nn.Module):
    """The live module, computing with the averaged parameters; without gradients."""

    def __init__(self, live: nn.Module) -> None:
        super().__init__()
        self.live = live
        self.parameters_here = list(live.parameters())
        self.averaged = [each.detach().clone() for each in self.parameters_here]

    @torch.no_grad()
    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self._in_place():
            return self.live(*inputs, **named)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._reshard()
        held = [local(each.detach()) for each in self.parameters_here]
        own = [each.clone() for each in held]
        torch._foreach_copy_(held, [local(each) for each in self.averaged])
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
        return {name: mine if mine is not None else each.detach() for name, each, mine in self._kept()}

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Live tensors and their averages, under their names in a state dict: wrappers change the other names."""
        mine = {id(own): each for own, each in zip(self.parameters_here, self.averaged, strict=True)}
        for name, each in self.live.state_dict(keep_vars=True).items():
            yield name, each, mine.get(id(each))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        for name, _, mine in self._kept():
            if mine is not None:
                mine.copy_(state_dict[name])


class ShardedAverage(AveragedModel):
    """As torch's AveragedModel with an exponential average of this ``decay``, and with its state dict."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)
        self._decay = decay
        self.module = self._inner = _Averaged(module)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        mine = [local(each) for each in self._inner.averaged]
        present = [local(each.detach()) for each in self._inner.parameters_here]
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
