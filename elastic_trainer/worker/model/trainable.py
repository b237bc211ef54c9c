"""Which parameters a training has and trains; changes by the script are noticed before they do harm.

The reduction over ranks is built for the parameters that require a gradient. If another one is unfrozen later, each
rank would use its own gradient, and the models would drift apart.

Checking all flags takes 30 ns per parameter, about as long as dropping a gradient.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a change that cannot be followed, naming the first parameter.
"""

from __future__ import annotations

from operator import attrgetter

import torch
import xxhash
from torch import nn

from elastic_trainer.checkpoint.sharded import local
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control, EqualityCheck, Purpose

_required = attrgetter("requires_grad")


class Trainable:
    """The parameters of ``module``, and which of them are in the groups of ``optimizer``."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._names, self.parameters = _listed(module)
        self.look()

    def look(self) -> None:
        """Take the present flags and groups as what is trained. ConfigError if a parameter is not the model's."""
        groups = self._optimizer.param_groups
        check_members(self._optimizer, self._module)
        names, parameters = _listed(self._module)
        if list(map(id, parameters)) != list(map(id, self.parameters)):
            raise ConfigError(
                f"parameter {_first_new(self, names, parameters)!r} is not the one that session.wrap() was given",
                hint="make all parameters before wrap(), and freeze those that are to be trained later",
            )
        self._flags, self._groups = list(map(_required, parameters)), len(groups)
        held = {id(each) for group in groups for each in group["params"]}
        self.outside = [each for each in parameters if id(each) not in held]
        """Those in no group of the optimizer."""

    @property
    def regrouped(self) -> bool:
        """Whether the optimizer has a new group."""
        return len(self._optimizer.param_groups) != self._groups

    @property
    def switched(self) -> bool:
        """Whether a parameter was frozen or unfrozen since :meth:`look`."""
        return list(map(_required, self.parameters)) != self._flags

    def switch(self) -> str:
        """The first such parameter and its change, in words."""
        pairs = zip(self._names, self.parameters, self._flags, strict=True)
        name, now = next((name, each.requires_grad) for name, each, flag in pairs if each.requires_grad != flag)
        return f"parameter {name!r} was {'unfrozen' if now else 'frozen'}"

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that must be equal on all ranks (a model can exclude some from DDP)."""
        ignored = getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())
        pairs = zip(self._names, self.parameters, strict=True)
        return [(name, local(each)) for name, each in pairs if name not in ignored and not each.is_meta]

    # ---- between ranks

    def agree(self, control: Control) -> None:
        """ConfigError on all ranks unless they train the same parameters; all call it in the same step."""
        flags = bytes(self._flags)
        if control.alone or EqualityCheck(control, Purpose.TRAINED, xxhash.xxh3_64_intdigest(flags)).wait():
            return
        rows = control.gather_bytes(flags)
        if len({len(row) for row in rows}) > 1:
            raise ConfigError("ranks train models of different sizes", hint="make the same model on all ranks")
        rank, place = next(
            (rank, place) for rank, row in enumerate(rows) for place, flag in enumerate(row) if flag != rows[0][place]
        )
        raise ConfigError(
            f"parameter {self._names[place]!r} is trained on rank {rank if rows[rank][place] else 0} and frozen on"
            f" rank {0 if rows[rank][place] else rank}",
            hint="freeze and unfreeze parameters at the same step on all ranks",
        )


def check_members(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """ConfigError for an optimizer that trains what is not in the model."""
    known = set(map(id, module.parameters()))
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in known for parameter in group["params"]):
            raise ConfigError(
                f"parameter group {number} of the optimizer holds a parameter that is not in the model",
                hint="make the optimizer from this model's parameters, and put all trained modules in one model",
            )


def _listed(module: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    named = list(module.named_parameters())
    return [name for name, _ in named], [parameter for _, parameter in named]


def _first_new(known: Trainable, names: list[str], parameters: list[nn.Parameter]) -> str:
    """The first parameter name that was added or removed."""
    before = set(map(id, known.parameters))
    added = [name for name, each in zip(names, parameters, strict=True) if id(each) not in before]
    return [*added, *sorted(set(known._names) - set(names)), *names][0]
