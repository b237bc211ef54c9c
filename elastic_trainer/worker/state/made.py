"""Whether a resumed job is the one that saved: its run, how it cuts its data, and what its script has made.

torch's ``load_state_dict`` brings the settings of the life that saved, and they go on. A resumed job takes those of the
script for the names in ``allow_changed`` alone; of all others it says that they do not count, or refuses them.

*Runs in* the worker's main thread, on all ranks alike. *Owns* nothing.
*Fails by* ConfigError naming the first thing that differs, or that cannot be followed.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import xxhash
from torch import nn

from elastic_trainer.checkpoint.codec import plain_name
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry.logs import logger

CUT = ("length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "drop_last")
NAMES = (*CUT, "arithmetic", "run")
SETTINGS = ("optimizer", "scheduler", "scaler")
"""What has settings of its own, such as ``optimizer.lr``."""


def allows(name: str, allow_changed: Collection[str]) -> bool:
    """Whether the setting ``name`` may have changed: it is named, or what it belongs to."""
    return any(name == each or name.startswith(f"{each}.") for each in allow_changed)


def check_fields(
    plan: EpochPlan, resumed: Mapping[str, Any], present: Mapping[str, Any], allow_changed: Collection[str]
) -> dict[str, Any]:
    """The fields of ``plan`` to save with the state.

    Raises ConfigError naming the first one that differs from the ``resumed`` checkpoint's, unless it is in
    ``allow_changed``. Nothing is compared once a plan of the session was alike (``present`` are its fields then).
    """
    unknown = sorted(name for name in allow_changed if name not in NAMES and name.partition(".")[0] not in SETTINGS)
    if unknown:
        raise ConfigError(
            f"allow_changed: there is no field {unknown[0]!r}",
            hint=f"known are {', '.join(NAMES)}, and settings such as optimizer.lr and scheduler.T_max",
        )
    fields: dict[str, Any] = asdict(plan)
    del fields["passes"]  # changes no sample
    for name, value in fields.items():
        if not present and name in resumed and resumed[name] != value and name not in allow_changed:
            raise ConfigError(
                f"'{name}' is {value} here and was {resumed[name]} when the checkpoint was saved",
                hint=f"set it back, or say allow_changed=[{name!r}]: samples may then repeat or be missed",
            )
    return fields


def check_run(checkpoint: str, saved_by: str | None, mine: str | None, allow_changed: Collection[str]) -> None:
    """ConfigError if another run has saved ``checkpoint``, unless that is allowed.

    Any run may continue a checkpoint saved without a run's name (by a script alone, or an earlier version).
    """
    if saved_by is None or saved_by == mine or "run" in allow_changed:
        return
    here = f"is run {mine!r}" if mine is not None else "is a run without a name"
    raise ConfigError(
        f"the newest checkpoint, {checkpoint}, was saved by run {saved_by!r}, and this {here}",
        hint="give each run a checkpoint directory of its own; to go on with that one's state under another name, say"
        " allow_changed=['run'] (--allow-changed run for a ready-made job)",
    )


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

    def follow(
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
