"""Closures given to ``optimizer.step()``: their passes are collectives, and belong before the update.

Most of torch's optimizers call the closure once and then update, so the session calls it for them. LBFGS and foreign
optimizers may call it again after they have changed parameters. Each call is then a whole pass over the batch and
returns the mean loss over all ranks, so that all decide the same. In place, the optimizer's previous state is kept, and
restored if a round ends in a pass.

*Runs in* the worker's main thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from elastic_trainer.worker.state.optimizer_set import load_exactly, parameters_of

Closure = Callable[[], Any]


def of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of ``optimizer.step`` (the first of which is the optimizer)."""
    given: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return given


def calls_once_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is known to call its closure once, before it changes anything."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


class Before:
    """Parameters and state of an optimizer, to be restored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._values = [each.detach().clone() for each in self._parameters]
        self._state = copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._values)
        load_exactly(self._optimizer, self._state)
