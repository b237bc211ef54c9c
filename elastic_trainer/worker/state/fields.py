"""Whether a resumed job is the one that saved, and cuts the same data in the same way. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.errors import ConfigError

CUT = ("length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "drop_last")
NAMES = (*CUT, "arithmetic", "run")
SETTINGS = ("optimizer", "scheduler", "scaler")
"""What has settings of its own, such as ``optimizer.lr``: see made."""


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
