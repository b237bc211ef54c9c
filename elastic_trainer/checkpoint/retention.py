"""Which checkpoints are kept and which are removed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from elastic_trainer.errors import ConfigError


class BestMode(StrEnum):
    """Whether lower or higher values of a metric are better."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Retention:
    """The policy: a checkpoint is kept if any of its rules selects it.

    ``keep_last`` newest ones; every one whose step is a multiple of ``keep_every``; the ``keep_best`` best by
    ``metric``; and always the newest one that was saved as best.
    """

    keep_last: int = 3
    keep_every: int | None = None
    metric: str | None = None
    mode: BestMode = BestMode.MIN
    keep_best: int = 1

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_best", self.keep_best)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", hint="keep at least 1 checkpoint")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every is {self.keep_every}", hint="give a number of steps, or leave it out")
        if self.mode not in tuple(BestMode):
            raise ConfigError(f"mode is {self.mode!r}", hint="say 'min' or 'max'")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The values of one checkpoint that the policy uses."""

    name: str
    step: int
    best: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether one checkpoint is kept, and why."""

    name: str
    keep: bool
    reason: str


def decide(newest_first: Sequence[Candidate], policy: Retention, protected: frozenset[str]) -> tuple[Ruling, ...]:
    """Judge each checkpoint, in the given order. ``protected`` names are always kept."""
    ranked = {each.name: order for order, each in enumerate(by_metric(newest_first, policy)[: policy.keep_best], 1)}
    flagged = next((each.name for each in newest_first if each.best), None)
    rulings = []
    for order, each in enumerate(newest_first, 1):
        reason = None
        if order <= policy.keep_last:
            reason = f"number {order} of the newest {policy.keep_last}"
        elif each.name in protected:
            reason = "it is in use"
        elif policy.keep_every is not None and each.step % policy.keep_every == 0:
            reason = f"step {each.step} is a multiple of {policy.keep_every}"
        elif each.name in ranked:
            reason = f"number {ranked[each.name]} by {policy.metric}"
        elif each.name == flagged:
            reason = "the newest that was saved as best"
        gone = f"number {order}; the newest {policy.keep_last} are kept"
        rulings.append(Ruling(each.name, reason is not None, reason or gone))
    return tuple(rulings)


def by_metric(newest_first: Sequence[Candidate], policy: Retention) -> list[Candidate]:
    """The candidates that have the policy's metric as a number, best first; ties newest first."""
    if policy.metric is None:
        return []
    sign = 1.0 if policy.mode is BestMode.MIN else -1.0
    values = [(sign * each.metrics.get(policy.metric, math.nan), each) for each in newest_first]
    return [each for value, each in sorted(((v, e) for v, e in values if not math.isnan(v)), key=lambda pair: pair[0])]
