"""The whole training state of a rank as one tree of plain values, and back: strictly, and all or nothing.

torch's ``load_state_dict`` brings the settings of the life that saved, and they go on. A resumed job takes those of the
script for the names in ``allow_changed`` alone; of all others it says that they do not count, or refuses them.

*Runs in* the worker's main thread. *Owns* the position of the training; the rest is the script's.
*Fails by* CheckpointError naming the first thing that does not fit, before anything is changed; ConfigError for what
cannot be trained together, or registered.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic_trainer import torch_internals
from elastic_trainer.checkpoint import LoadInto
from elastic_trainer.checkpoint.codec import local, plain_name
from elastic_trainer.checkpoint.manifest import not_finite
from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry.logs import logger

FORMAT = 1
_DESCRIBED = 512
"""Bytes that a checkpoint has for each tensor beside its data."""
_HINT = "the checkpoint is of a different model or optimizer; use another checkpoint_dir, or the code that wrote it"


class Stateful(Protocol):
    """What can be registered: anything with the two methods of torch's own objects.

    A part may also have ``check_state(state_dict)``, which raises ConfigError or CheckpointError for a state of another
    job. It is called before anything is compared or changed.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Records(Protocol):
    """The ledger, as the state holds it."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any] | None) -> None: ...


@dataclass(slots=True)
class Position:
    """How far training has come. ``generation`` orders the states of different lives of the job."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    generation: int = 0
    lineage: int = 0
    """The generation that committed the last step: with the step number it identifies the state."""
    best: dict[str, float] = field(default_factory=dict)
    """The metrics of the best state so far."""


@dataclass(slots=True)
class TrainingState:
    """The parts. ``user`` are registered objects, ``pending`` states of objects not registered yet."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    position: Position
    user: dict[str, Stateful]
    pending: dict[str, Any]
    device: torch.device
    average: AveragedModel | None = None
    sharding: ModuleType | None = None
    """:mod:`~elastic_trainer.worker.state.shards`, which is slow to import; None: the state is whole."""
    own_optimizer: bool = False
    """Whether each rank has a state of the optimizer of its own."""
    records: Records | None = None
    """Which samples the steps have used, as far as no segment of the ledger says so."""
    made: Made = field(init=False)
    settings: dict[str, str] = field(init=False)
    """With what is trained, by name, in words."""

    def __post_init__(self) -> None:
        self.made = Made(self.module, self.optimizer, self.scheduler, self.scaler)
        self.settings = dict(self.made.named)

    # ---- out

    def collect(self) -> dict[str, Any]:
        """The state, of a sharded model this rank's shards; tensors are the live ones, not copies."""
        return self._shards_of(self.for_storage())

    def _shards_of(self, state: dict[str, Any]) -> dict[str, Any]:
        shards: dict[str, Any] = state if self.sharding is None else self.sharding.shards_of(state)
        return shards

    def for_storage(self) -> dict[str, Any]:
        """The state as it is saved: a sharded tensor is the DTensor itself."""
        cursor, optimizer = self.position.cursor, self.optimizer.state_dict()
        if self.sharding is not None:
            optimizer = self.sharding.completed_optimizer(optimizer, parameters_of(self.optimizer))
        return {
            "format": FORMAT,
            "position": {
                "step": self.position.step,
                "generation": self.position.generation,
                "lineage": self.position.lineage,
                "epoch": cursor.epoch,
                "samples": cursor.samples,
                "best": dict(self.position.best),
            },
            "model": plainly(self.module.state_dict()),
            "optimizer": {
                "kind": kind_of(self.optimizer),
                "parameters": parameter_names(self.module, self.optimizer),
                "state": optimizer,
            },
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "average": None if self.average is None else plainly(self.average.state_dict()),
            "user": {**self.pending, **{name: each.state_dict() for name, each in self.user.items()}},
            "random": random_state(self.device),
            "frozen": frozen(self.module),
            "settings": dict(self.settings),
            **({} if self.records is None else {"ledger": self.records.state()}),
        }

    def size(self) -> int:
        """About how many bytes of tensors this rank holds, without registered objects."""
        averages = {} if self.average is None else self.average.state_dict()
        found = _tensors([dict(self.module.state_dict()), dict(averages), list(self.optimizer.state.values())])
        here = [each for each in found if not each.is_meta]
        return sum(local(each).nbytes + _DESCRIBED for each in here)

    def committed(self) -> dict[str, Any]:
        """The parts that only the commit of a step changes, and all ranks alike."""
        committed = {
            "parameters": {plain_name(name): each.detach() for name, each in self.module.named_parameters()},
            "optimizer": None if self.own_optimizer else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }
        return self._shards_of(committed)

    def targets(self) -> LoadInto:
        """The tensors that a checkpoint of the same model and optimizer can be read into, before it is applied."""
        parts = {"model": self.module, "average": self.average}
        held = {name: {} if each is None else each.state_dict(keep_vars=True) for name, each in parts.items()}
        # A checkpoint of before has the names of wrapped modules.
        state = {name: {**each, **plainly(each)} for name, each in held.items()}
        like = {} if self.sharding is None else dict(enumerate(parameters_of(self.optimizer)))
        return LoadInto(
            {**state, "optimizer": {"state": self.optimizer.state_dict()}},
            like={("optimizer", "state", "state", number): each for number, each in like.items()},
            fits=self._fits,
        )

    # ---- in

    def apply(self, state: Mapping[str, Any], *, first_rank: bool) -> None:
        """Make ``state`` the present one. Only the first rank adopts the random generators."""
        state = {**state, **{name: plainly(state[name]) for name in ("model", "average") if state.get(name)}}
        if self.sharding is not None:
            state = self._placed(state, self.sharding)
        self._check(state)
        waiting = {name: part for name, part in state["user"].items() if name not in self.user}
        small = [(self.user[name], state["user"][name]) for name in self.user if name in state["user"]]
        small += [(part, state[name]) for name, part in self._optional().items() if part is not None]
        _load_all(small)
        load_exactly(self.optimizer, state["optimizer"]["state"])
        self.module.load_state_dict(_named_as(self.module, state["model"]))
        if self.average is not None and state.get("average") is not None:
            self.average.load_state_dict(_named_as(self.average, state["average"]))
        elif self.average is not None:  # without an average in the checkpoint it begins at the parameters
            self.average.module.load_state_dict(_named_as(self.average.module, state["model"]))
            self.average.n_averaged.zero_()
        self.pending.clear()
        self.pending.update(waiting)
        where = state["position"]
        self.position.step, self.position.generation = where["step"], where["generation"]
        self.position.lineage = where["lineage"]
        self.position.cursor, self.position.best = Cursor(where["epoch"], where["samples"]), dict(where["best"])
        if "frozen" in state:  # a checkpoint of before lacks these two
            freeze(self.module, state["frozen"])
        if self.records is not None:
            self.records.load(state.get("ledger"))
        if "settings" in state:
            self.settings = dict(state["settings"])
        if first_rank:
            set_random_state(state["random"], self.device)

    def _placed(self, state: Mapping[str, Any], sharding: ModuleType) -> Mapping[str, Any]:
        """The ``state`` (shards or whole tensors) sharded as the live one is."""
        kept = state["optimizer"]
        average = state.get("average")
        if average is not None and self.average is not None:
            average = sharding.placed_model(average, plainly(self.average.state_dict()))
        return {
            **state,
            "model": sharding.placed_model(state["model"], plainly(self.module.state_dict())),
            "optimizer": {**kept, "state": sharding.placed_optimizer(kept["state"], parameters_of(self.optimizer))},
            "average": average,
        }

    def register(self, name: str, part: Stateful) -> None:
        """Save ``part`` with the state from now on; if a resumed state contains it, load it now."""
        check_part(name, part, self.user)
        if name in self.pending:
            _load_all([(part, self.pending[name])])
            del self.pending[name]
        self.user[name] = part

    def _optional(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether nothing speaks against ``state``, whose tensors have no data: parts that check tensors cannot say.

        A sharded state has no other way in: what does not fit raises.
        """
        if self.sharding is not None:
            self._check(state, {name: each for name, each in state.get("user", {}).items() if not _has_tensors(each)})
            return True
        checking = [name for name, each in self.user.items() if hasattr(each, "check_state")]
        if any(_has_tensors(state.get("user", {}).get(name)) for name in checking):
            return False
        try:
            self._check(state)
        except (CheckpointError, ConfigError):
            return False
        return True

    def _check(self, state: Mapping[str, Any], user: Mapping[str, Any] | None = None) -> None:
        """``user``: those of its registered objects that can be looked at."""
        if state.get("format") != FORMAT:
            raise CheckpointError(f"the state has format {state.get('format')!r}, not {FORMAT}", hint=_HINT)
        looked_at = state["user"] if user is None else user
        for name, registered in self.user.items():
            if name in looked_at and hasattr(registered, "check_state"):
                registered.check_state(looked_at[name])
        check_module(self.module, state["model"])
        check_optimizer(self.module, self.optimizer, state["optimizer"])
        if self.average is not None and state.get("average") is not None:
            check_module(self.average, state["average"])
        for name, part in self._optional().items():
            if (part is None) != (state[name] is None):
                has = "has no" if state[name] is None else "has a"
                raise CheckpointError(
                    f"the checkpoint {has} {name}, this job {'has no' if part is None else 'has'} one", hint=_HINT
                )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
    elif isinstance(value, torch.Tensor):
        yield value


def _has_tensors(value: Any) -> bool:
    return next(_tensors(value), None) is not None


def check_part(name: str, part: Any, taken: Mapping[str, Any]) -> None:
    """ConfigError unless ``part`` can be registered as ``name``."""
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(part, method, None)):
            raise ConfigError(f"register({name!r}): {type(part).__name__} has no {method}()", hint="give it one")
    if name in taken:
        raise ConfigError(f"register({name!r}): the name is taken", hint="use another name")


def plainly(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of a module under names that do not depend on what is wrapped (see ``plain_name``)."""
    plain = [plain_name(name) for name in state]
    return state if plain == list(state) else dict(zip(plain, state.values(), strict=True))


def _named_as(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state``, which fits ``module``, under the names that this has."""
    names = list(module.state_dict())
    return state if all(name in state for name in names) else {name: state[plain_name(name)] for name in names}


def check_module(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """CheckpointError naming the first tensor of ``saved`` that does not fit ``module``."""
    known, saved = plainly(module.state_dict()), plainly(saved)
    for name, mine in known.items():
        if name not in saved:
            raise CheckpointError(f"model tensor {name!r} is not in the checkpoint", hint=_HINT)
        theirs = saved[name]
        if isinstance(mine, torch.Tensor) and (mine.shape != theirs.shape or mine.dtype != theirs.dtype):
            raise CheckpointError(
                f"model tensor {name!r} is {_described(mine)} here and {_described(theirs)} in the checkpoint",
                hint=_HINT,
            )
    for name in saved:
        if name not in known:
            raise CheckpointError(f"model tensor {name!r} of the checkpoint is not in this model", hint=_HINT)


def check_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """CheckpointError naming the first part of ``saved`` that does not fit ``optimizer``."""
    if saved["kind"] != kind_of(optimizer):
        raise CheckpointError(
            f"the optimizer is {kind_of(optimizer)} here and {saved['kind']} in the checkpoint", hint=_HINT
        )
    mine, theirs = optimizer.param_groups, saved["state"]["param_groups"]
    if len(mine) != len(theirs):
        raise CheckpointError(
            f"the optimizer has {len(mine)} parameter groups here and {len(theirs)} in the checkpoint", hint=_HINT
        )
    named = parameter_names(module, optimizer)
    for group, (here, there) in enumerate(zip(named, saved["parameters"], strict=True)):
        if len(here) != len(there):
            raise CheckpointError(
                f"optimizer group {group} has {len(here)} parameters here and {len(there)} in the checkpoint",
                hint=_HINT,
            )
        for mine_name, their_name in zip(here, map(plain_name, there), strict=True):
            if mine_name != their_name:
                raise CheckpointError(
                    f"optimizer group {group} has {mine_name!r} where the checkpoint has {their_name!r}", hint=_HINT
                )


def parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the optimizer's parameters by group; its state knows them by position only."""
    names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _described(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _load_all(parts: list[tuple[Any, Any]]) -> None:
    """Load each part; if one refuses, restore all."""
    before = [(part, copy.deepcopy(part.state_dict())) for part, _ in parts]
    try:
        for part, state in parts:
            part.load_state_dict(state)
    except Exception as error:
        for part, state in before:
            part.load_state_dict(state)
        raise CheckpointError(
            f"a registered part refused its state: {type(error).__name__}: {error}", hint=_HINT
        ) from error


def watched(module: torch.nn.Module, tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters that must be finite, by name, as the state ``tree`` holds them."""
    named = module.state_dict(keep_vars=True).items()
    held = (
        (name, tree["model"].get(plain_name(name), each))
        for name, each in named
        if isinstance(each, torch.nn.Parameter)
    )
    return {name: each for name, each in held if each.is_floating_point() and each.numel() and not each.is_meta}


def check_finite(module: torch.nn.Module, tree: Mapping[str, Any]) -> None:
    """NonFiniteError naming the first parameter that holds a NaN or an infinity."""
    for name, each in watched(module, tree).items():
        if not bool(torch.isfinite(local(each)).all()):
            raise not_finite(name)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all random generators of this process."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators; a CUDA state is skipped where there is no such device, and vice versa."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


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
        for index, each in enumerate(self.members):
            own = each.state_dict()
            state |= {
                first + key if isinstance(key, int) else f"{index}/{key}": known for key, known in own["state"].items()
            }
            groups += [
                {**group, "params": [first + number for number in group["params"]]} for group in own["param_groups"]
            ]
            first += len(parameters_of(each))
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        for index, each in enumerate(self.members):
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            last = first + len(parameters_of(each))
            load_exactly(
                each,
                {
                    "state": {
                        key - first if isinstance(key, int) else key.partition("/")[2]: known
                        for key, known in state_dict["state"].items()
                        if (first <= key < last if isinstance(key, int) else key.startswith(f"{index}/"))
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


# ---- the settings of optimizer, schedule and scaler


SETTINGS = ("optimizer", "scheduler", "scaler")
"""What has settings of its own, such as ``optimizer.lr``."""


def allows(name: str, allow_changed: Collection[str]) -> bool:
    """Whether the setting ``name`` may have changed: it is named, or what it belongs to."""
    return any(name == each or name.startswith(f"{each}.") for each in allow_changed)


FROZEN = "frozen"
"""Of the parameters that the script had frozen before it wrapped the model. Here the script always decides."""
_TYPE = "scheduler.type"
_HOW = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Of a parameter group: what it holds, what is looked at apart, and how torch computes, which changes no result."""
_MOVING = {"base_lrs", "last_epoch"}
"""Of a schedule: how far it is, and the learning rates of the optimizer. What begins with an underscore follows."""
_PARTS = {"_schedulers", "_milestones"}
"""Those that do not follow from others."""
_MERGED = {"lr_lambdas", "settings"}
"""What these hold is named as if the schedule held it."""


def frozen(module: nn.Module) -> list[str]:
    """The names of the parameters that are not trained."""
    return [plain_name(name) for name, each in module.named_parameters() if not each.requires_grad]


def freeze(module: nn.Module, names: Collection[str]) -> None:
    """Train all parameters but these."""
    known = frozenset(names)
    for name, each in module.named_parameters():
        trained = plain_name(name) not in known
        if each.requires_grad is not trained:  # others stay untouched: of whole numbers none can be trained
            each.requires_grad_(trained)


def advanced(scheduler: Any) -> Any:
    """How often ``scheduler`` was advanced; None without one."""
    return getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", None))


class Made:
    """The settings of the script, as they are before anything is loaded; ``named`` has each by its name, in words."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, scaler: Any) -> None:
        self._module, self._optimizer, self._scheduler, self._scaler = module, optimizer, scheduler, scaler
        self._frozen = frozen(module)
        self._groups = [
            {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in group.items()}
            for group in ({**group, "params": ()} for group in optimizer.param_groups)
        ]
        self._schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._scaling = (
            {} if scaler is None else {k: v for k, v in scaler.state_dict().items() if k.startswith(_SCALES)}
        )
        self._begun = advanced(scheduler)
        self.named = dict(self._found())

    def _found(self) -> Iterator[tuple[str, str]]:
        yield FROZEN, _listed(self._frozen)
        rates = [group.get("initial_lr", group.get("lr")) for group in self._groups]
        for key in dict.fromkeys(key for group in self._groups for key in group if key not in _HOW):
            yield from _shown(f"optimizer.{key}", [group.get(key) for group in self._groups])
        yield from _shown("optimizer.lr", rates)
        if self._schedule is not None:
            yield _TYPE, type(self._scheduler).__name__
            yield from _flat("scheduler", self._schedule)
        yield from _flat("scaler", self._scaling)

    def check(self, allow_changed: Collection[str]) -> None:
        """ConfigError for the name of a setting that there is not."""
        for name in allow_changed:
            if name.partition(".")[0] in SETTINGS and not any(allows(each, (name,)) for each in self.named):
                known = ", ".join(sorted(each for each in self.named if each != FROZEN))
                raise ConfigError(f"allow_changed: there is no setting {name!r}", hint=f"here are {known}")

    def adopt(
        self, saved: Mapping[str, str], allow_changed: Collection[str], *, strict: bool, says: bool
    ) -> dict[str, str]:
        """After a resume: what counts from now on, by name; ``saved`` is what counted when the checkpoint was saved.

        ``strict``: a setting that is another one, and not in ``allow_changed``, is an error. ``says``: by this rank.
        """
        other = {name: was for name, mine in self.named.items() if (was := saved.get(name, mine)) != mine}
        taken = [name for name in other if name == FROZEN or allows(name, allow_changed)]
        for name in other:
            if name in taken:
                continue
            sentence = f"'{name}' is {self.named[name]} here and was {other[name]} when the checkpoint was saved"
            if strict or name == _TYPE:
                raise ConfigError(
                    sentence,
                    hint=f"set it back, or say allow_changed=[{name!r}] (--allow-changed {name} for a ready-made job)"
                    " to go on with the new one",
                )
            if says:
                hint = f"it stays {other[name]}; to go on with the new one say allow_changed=[{name!r}]"
                logger().warning("setting.kept", name=name, here=self.named[name], kept=other[name], hint=hint)
        self._take(taken, [name for name in other if name not in taken])
        rates = [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        for name in taken if says else ():
            logger().warning("setting.changed", name=name, before=other[name], now=self.named[name], lr=rates)
        return {name: other[name] if name in other and name not in taken else mine for name, mine in self.named.items()}

    def _take(self, names: Sequence[str], kept: Sequence[str]) -> None:
        if FROZEN in names:
            freeze(self._module, self._frozen)
        for group, made in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in made.keys() & {name.removeprefix("optimizer.") for name in names} - _HOW:
                _put(group, key, made[key])
        scales = {key for key in self._scaling if f"scaler.{key}" in names}
        if scales:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **{key: self._scaling[key] for key in scales}})
        if "optimizer.lr" in names or any(name.startswith("scheduler.") for name in names):
            self._begin_anew([name for name in kept if name == "optimizer.lr" or name.startswith("scheduler.")])

    def _begin_anew(self, kept: Sequence[str]) -> None:
        """Set the learning rates of the script, and where it has a schedule, go along that as far as training is."""
        if kept:
            raise ConfigError(
                f"the learning rate cannot change while {kept[0]!r} stays as it was when the checkpoint was saved",
                hint=f"set that back, or say allow_changed=[..., {kept[0]!r}] too",
            )
        steps = _difference(advanced(self._scheduler), self._begun)
        for group, made in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in made.keys() & {"lr", "initial_lr"}:
                _put(group, key, made[key])
        if self._scheduler is None:
            return
        self._scheduler.load_state_dict(copy.deepcopy(self._schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the updates, which an earlier life has made
            try:
                for _ in range(steps):
                    self._scheduler.step()
            except ValueError as error:
                raise ConfigError(
                    f"the new schedule does not go as far as the training, step {steps}: {error}",
                    hint="make it longer, or set it back",
                ) from error


_SCALES = ("growth_factor", "backoff_factor", "growth_interval")


def _difference(now: Any, begun: Any) -> int:
    if isinstance(now, tuple):
        return max((_difference(*each) for each in zip(now, begun, strict=True)), default=0)
    return 0 if now is None else int(now) - int(begun)


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = value


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings within ``value``, each under its path."""
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in _MOVING and (key in _PARTS or not str(key).startswith("_")):
                yield from _flat(name if key in _MERGED else f"{name}.{str(key).lstrip('_')}", each)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        alike = all(each == value[0] for each in value)
        for number, each in enumerate(value[:1] if alike else value):
            yield from _flat(name if alike else f"{name}.{number}", each)
    else:
        yield from _shown(name, [value])


def _shown(name: str, values: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """The setting ``name`` in words, unless it is no plain value; ``values``: those of all parameter groups."""
    words = [_words(each) for each in values]
    if None not in words:
        alike = len(set(words)) == 1
        yield name, str(words[0]) if alike else f"[{', '.join(map(str, words))}]"


def _words(value: Any) -> str | None:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        inner = [_words(each) for each in value]
        return None if None in inner else f"[{', '.join(map(str, inner))}]"
    if isinstance(value, float):
        return repr(float(value))
    return repr(value) if isinstance(value, bool | int | str | None) else None


def _listed(names: Sequence[str]) -> str:
    """A few ``names`` as they are; of many the first, their number and a digest."""
    if len(names) <= 4:
        return ", ".join(names) or "none"
    return f"{names[0]} and {len(names) - 1} more ({xxhash.xxh3_64_hexdigest(' '.join(names).encode())})"
