"""Whether a resumed job cuts the same data in the same way as the one that saved. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.errors import ConfigError

NAMES = ("length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "arithmetic")


def check_fields(
    plan: EpochPlan, resumed: Mapping[str, Any], present: Mapping[str, Any], allow_changed: Collection[str]
) -> dict[str, Any]:
    """The fields of ``plan`` to save with the state.

    Raises ConfigError naming the first one that differs from the ``resumed`` checkpoint's, unless it is in
    ``allow_changed``. Only the first plan of a session is compared (``present`` is empty then).
    """
    unknown = sorted(set(allow_changed) - set(NAMES))
    if unknown:
        raise ConfigError(f"allow_changed: there is no field {unknown[0]!r}", hint=f"known are {', '.join(NAMES)}")
    fields: dict[str, Any] = asdict(plan)
    for name, value in fields.items():
        if not present and name in resumed and resumed[name] != value and name not in allow_changed:
            raise ConfigError(
                f"'{name}' is {value} here and was {resumed[name]} when the checkpoint was saved",
                hint=f"set it back, or say allow_changed=[{name!r}]: samples may then repeat or be missed",
            )
    return fields
