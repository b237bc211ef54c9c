"""What ``session.wrap`` returns: one type for the whole life of a script, alone, on many ranks and across rounds.

Calling it goes through what averages gradients in the present round. All else is the bare model's: its attributes and
methods (``wrapped.generate()``), its parameters under their own names, its state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_trainer.errors import ConfigError

Call = Callable[[Callable[..., Any], Any, Any], Any]
"""Makes a call in place of the runner; gets what to call, and the arguments."""
_TABLES = ("_parameters", "_buffers", "_modules")


class WrappedModel(nn.Module):
    """``module`` is the bare model; ``called`` the compiled one, if it was compiled, else the same."""

    module: nn.Module
    called: nn.Module

    def __init__(self, module: nn.Module, called: nn.Module) -> None:
        own, training = self.__dict__, module.training
        own.update(module=module, called=called, _through=called, _call=None)
        super().__init__()
        module.training = training
        own.update({name: module.__dict__[name] for name in _TABLES})  # shared, so that names are the bare model's

    def forward(self, *inputs: Any, **named: Any) -> Any:
        through, call = self.__dict__["_through"], self.__dict__["_call"]
        return through(*inputs, **named) if call is None else call(through, inputs, named)

    def go_through(self, parallel: Callable[..., Any] | None) -> None:
        """Call ``parallel``, which calls the model, from now on; None: the model itself."""
        self.__dict__["_through"] = self.called if parallel is None else parallel

    def intercept(self, call: Call | None) -> None:
        """Route each call through ``call`` from now on; None: call directly."""
        self.__dict__["_call"] = call

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here only add up locally, as in DistributedDataParallel."""
        through = self.__dict__["_through"]
        return through.no_sync() if isinstance(through, DistributedDataParallel) else nullcontext()

    @property
    def training(self) -> bool:
        """Of the bare model."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __getitem__(self, key: Any) -> Any:
        module: Any = self.module
        return module[key]

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["module"], name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is of the bare model: a round's groups cannot be copied."""
        return copy.deepcopy(self.module, memo)


def refuse_ddp(module: nn.Module) -> None:
    """Before ``DistributedDataParallel(module)`` in an open session: ConfigError if it cannot work there."""
    if isinstance(module, WrappedModel) or not dist.is_initialized():
        raise ConfigError("DistributedDataParallel inside a session", hint=_BARE)


def check_bare(model: nn.Module) -> None:
    """ConfigError if ``model`` sums gradients by itself."""
    for each in model.modules():
        if isinstance(each, DistributedDataParallel | nn.DataParallel):
            raise ConfigError(f"session.wrap() of a model in {type(each).__name__}", hint=_BARE)


_BARE = "give session.wrap() the bare model and call what it returns: it averages the gradients of all ranks"


def bare(module: nn.Module) -> nn.Module:
    """What ``torch.compile`` was given, if ``module`` is compiled."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
