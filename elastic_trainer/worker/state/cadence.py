"""How often to save: every N steps, every T seconds, or as its cost and the failures seen make best. Pure.

The interval of ``auto`` is Daly's: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22 (2006), equation 37; its first term is that of J. W. Young, "A first order
approximation to the optimum checkpoint interval", Communications of the ACM 17 (1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.placement import AUTO

FIELD: Final = "experience"
"""The field of a checkpoint that holds what ``auto`` has learned."""
PRIOR_S: Final = 6 * 3600.0
"""Training time to the next failure that is assumed while none has been seen; it counts as one failure seen."""
FIRST_S: Final = 60.0
"""The interval before a save has been measured."""
SHORTEST_S: Final = 10.0
LONGEST_S: Final = 1800.0
_SMOOTHING: Final = 0.3
LEAST_APART_S: Final = 5.0
_SHARE: Final = 0.01
"""Part of the training time that snapshots in memory may take."""
_SENT_SHARE: Final = 0.05
"""Part of the time in which a copy may be on its way to the neighbour, beside training."""


class WhenBehind(StrEnum):
    """What becomes of a save by steps while storage is still busy with the two before it."""

    WAIT = "wait"
    SKIP = "skip"
    REPLACE = "replace"
    """The snapshot that waits is given up for the new one."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often to save. All ranks count the same steps; the seconds (``"auto"``: chosen here) are rank 0's."""

    every_steps: int | None = None
    every_s: float | str | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"checkpoint_every_steps is {self.every_steps}", hint="it must be at least 1, or None")
        if isinstance(self.every_s, str):
            if self.every_s != AUTO:
                raise ConfigError(
                    f"checkpoint_every_s is {self.every_s!r}", hint=f"give seconds, {AUTO!r}, or None for never"
                )
        elif self.every_s is not None and not self.every_s > 0:
            raise ConfigError(f"checkpoint_every_s is {self.every_s}", hint="it must be positive, or None")

    @property
    def auto(self) -> bool:
        return self.every_s == AUTO

    def interval_s(self, seen: Experience) -> float | None:
        """Seconds between two saves by time; None for none."""
        return best_interval_s(seen) if isinstance(self.every_s, str) else self.every_s


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that outlives this process: the agent's ``files``, and how often to copy the state there.

    ``beside`` are the files of the other places of a sharded model.
    """

    files: Sequence[Path] = ()
    every_s: float | str | None = AUTO
    beside: Sequence[Path] = ()

    def apart_s(self, took_s: float, sent_s: float = 0.0) -> float:
        """Seconds between snapshots that take ``took_s``, and ``sent_s`` to the neighbour; infinite for none."""
        if self.every_s is None or not self.files:
            return math.inf
        longest = max(LEAST_APART_S, took_s / _SHARE, sent_s / _SENT_SHARE)
        return longest if isinstance(self.every_s, str) else self.every_s


@dataclass(frozen=True, slots=True)
class Experience:
    """What this training's saves cost and how often it failed. ``failures``: lives that resumed and had lost steps."""

    cost_s: float | None = None
    """Seconds for which a save held up the training, smoothed; None before the first."""
    trained_s: float = 0.0
    failures: int = 0

    @property
    def mean_time_to_failure_s(self) -> float:
        """Posterior mean of a failure rate that was assumed to be one in ``PRIOR_S``."""
        return (PRIOR_S + self.trained_s) / (1 + self.failures)

    def saved(self, cost_s: float) -> Experience:
        """After one more save."""
        before_s = self.cost_s if self.cost_s is not None else cost_s
        return replace(self, cost_s=before_s + _SMOOTHING * (cost_s - before_s))

    def kept(self, *, settled: bool) -> dict[str, Any]:
        """The field of a checkpoint; ``settled``: it is the last of this life, so nothing is lost behind it."""
        return {"trained_s": round(self.trained_s, 3), "failures": self.failures, "settled": settled}

    @classmethod
    def resumed(cls, fields: Mapping[str, Any], *, lost: bool = True) -> Experience:
        """The experience of a life that resumes the checkpoint with these ``fields``; ``lost``: whether steps after
        it were lost, as far as is known."""
        kept = fields.get(FIELD)
        if not isinstance(kept, Mapping):
            return cls()
        failed = lost and not kept.get("settled")
        return cls(trained_s=float(kept.get("trained_s", 0.0)), failures=int(kept.get("failures", 0)) + failed)


def best_interval_s(seen: Experience) -> float:
    """The interval that loses least training time to saves and, after failures, to repeated steps."""
    if seen.cost_s is None:
        return FIRST_S
    mean_s = seen.mean_time_to_failure_s
    cost_s = min(seen.cost_s, 2.0 * mean_s)  # the formula ends there; Daly's step to the mean would reverse the order
    share = cost_s / (2.0 * mean_s)
    best_s = math.sqrt(2.0 * cost_s * mean_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - cost_s
    return min(LONGEST_S, max(SHORTEST_S, best_s))
