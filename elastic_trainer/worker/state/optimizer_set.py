"""Several optimizers, and several schedulers, as one to the rest of the session.

The state of the optimizers is numbered as that of one with all their parameter groups, so it is saved, healed and read
straight into the tensors as any other.

*Runs in* the worker's main thread. *Fails by* ConfigError for what cannot be trained together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_trainer import torch_internals
from elastic_trainer.errors import ConfigError


class OptimizerSet(torch.optim.Optimizer):
    """``members`` by name; each is stepped by the script."""

    def __init__(self, members: Mapping[str, torch.optim.Optimizer]) -> None:
        if not members:
            raise ConfigError("optimizer is an empty dictionary", hint="give at least one")
        self.members = tuple(members.values())
        seen: dict[int, str] = {}
        for name, each in members.items():
            for parameter in parameters_of(each):
                if (other := seen.setdefault(id(parameter), name)) != name:
                    raise ConfigError(
                        f"optimizers {other!r} and {name!r} hold the same parameter", hint="give it to one of them"
                    )

    @property
    def kind(self) -> str:
        """The members' types, as a checkpoint names them."""
        return " + ".join(type(each).__name__ for each in self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all members, one member after another."""
        return [group for each in self.members for group in each.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """That of all members, by parameter."""
        return {parameter: known for each in self.members for parameter, known in each.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """As if it were one optimizer."""
        state: dict[int | str, Any] = {}  # a key that is no parameter's number belongs to a whole member
        groups: list[dict[str, Any]] = []
        first = 0
        for place, each in enumerate(self.members):
            own = each.state_dict()
            state |= {
                first + key if isinstance(key, int) else f"{place}/{key}": known for key, known in own["state"].items()
            }
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
            first += len(parameters_of(each))
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        for place, each in enumerate(self.members):
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            last = first + len(parameters_of(each))
            load_exactly(
                each,
                {
                    "state": {
                        key - first if isinstance(key, int) else key.partition("/")[2]: known
                        for key, known in state_dict["state"].items()
                        if (first <= key < last if isinstance(key, int) else key.startswith(f"{place}/"))
                    },
                    "param_groups": [
                        {**group, "params": [number - first for number in group["params"]]} for group in own
                    ],
                },
            )
            first = last

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.members:
            each.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"OptimizerSet({self.kind})"


class SchedulerSet:
    """``members`` by name, all advanced together."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    @property
    def _step_count(self) -> tuple[Any, ...]:
        return tuple(map(advanced, self.members.values()))

    def step(self) -> None:
        for each in self.members.values():
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.members):
            raise ValueError(f"the state has schedulers {sorted(state)}, this job {sorted(self.members)}")
        for name, each in self.members.items():
            each.load_state_dict(state[name])


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that ``optimizer`` consists of."""
    return optimizer.members if isinstance(optimizer, OptimizerSet) else (optimizer,)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its type, or of those of its members."""
    return optimizer.kind if isinstance(optimizer, OptimizerSet) else type(optimizer).__name__


def advanced(scheduler: Any) -> Any:
    """How often ``scheduler`` was advanced; None without one."""
    return getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", None))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its parameters, as its state numbers them."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def load_exactly(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load the state ``saved``, and put back what torch casts to a parameter's dtype: all its tensors but ``step``.

    An optimizer that loads its state in a way of its own is left to that.
    """
    optimizer.load_state_dict(saved)
    if torch_internals.loads_its_own_way(optimizer):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        _uncast(saved["state"].get(number), optimizer.state.get(parameter), parameter.dtype)


def _uncast(saved: Any, loaded: Any, dtype: torch.dtype, name: Any = None) -> Any:
    """``loaded`` with those tensors of ``saved`` that were cast to ``dtype``, on the devices where torch put them."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        cast = name != "step" and loaded.dtype == dtype != saved.dtype and loaded.shape == saved.shape
        return saved.to(loaded.device, copy=True) if cast else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for each in saved.keys() & loaded.keys():
            loaded[each] = _uncast(saved[each], loaded[each], dtype, each)
    elif isinstance(saved, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(loaded)(_uncast(old, new, dtype) for old, new in zip(saved, loaded, strict=True))
    return loaded
