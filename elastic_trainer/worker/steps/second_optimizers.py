"""Refuses further optimizers where a step that is given up could not undo their update.

In place a step is undone when its round ends before the commit, which is the update by the session's own optimizer.
Optimizers of tensors that do not outlive the step (a latent code, the inner loop of meta-learning) are allowed.

*Runs in* the worker's main thread. *Owns* a hook that torch calls before each step of any optimizer.
*Fails by* ConfigError, before the second optimizer has changed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.state.optimizer_set import parameters_of
from elastic_trainer.worker.steps.engine import Steps


class SecondOptimizers:
    """See the module. ``own`` are the session's, ``parts`` the script's registered objects, at any time."""

    def __init__(
        self, module: nn.Module, own: Sequence[torch.optim.Optimizer], parts: Mapping[str, Any], steps: Steps
    ) -> None:
        self._own, self._parts, self._steps = own, parts, steps
        self._wrapped = _ids(module.parameters())
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """The step in which each was first used."""
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._own or self._steps.updating:  # the session's may contain others
            return
        kind = type(optimizer).__name__
        mine = _ids(_parameters(optimizer))
        if mine & self._wrapped:
            raise ConfigError(
                f"a second optimizer, {kind}, was about to change parameters of the wrapped model; in place the session"
                " could neither undo that nor send it to other ranks",
                hint="train all of them with the optimizer given to session.wrap(), in parameter groups of their own",
            )
        number = self._steps.uncommitted
        if number is not None and (self._seen.setdefault(optimizer, number) != number or self._registered(mine)):
            raise ConfigError(
                f"a second optimizer, {kind}, was about to make an update inside session.step(); in place a step may be"
                " given up, and this update would stay",
                hint="make it after the block, under `if step.committed:`, or put all that is trained in one model",
            )

    def _registered(self, parameters: frozenset[int]) -> bool:
        """Whether a registered module has some of ``parameters``, or a registered optimizer trains them."""
        return any(parameters & _ids(_parameters(part)) for part in self._parts.values())


def _parameters(part: object) -> Iterable[torch.Tensor]:
    if isinstance(part, torch.optim.Optimizer):
        return parameters_of(part)
    return part.parameters() if isinstance(part, nn.Module) else ()


def _ids(parameters: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(map(id, parameters))
