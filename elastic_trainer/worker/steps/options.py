"""What a script requests of its session, checked once and frozen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.checkpoint import EventSink, Retention
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import one_of
from elastic_trainer.worker.comm.placement import AUTO
from elastic_trainer.worker.state.saver import Cadence, WhenBehind, Writers

STOP_TIMEOUT_S = 10.0
EVERY_STEPS = 100
"""How often ranks compare their parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """Less common options for checkpoints.

    ``keep_every`` (a step multiple) keeps more of them, or ``retention`` defines the whole policy.
    ``require_last_save``: exit with code 73 on all ranks if the final state cannot be saved. ``on_event`` gets each
    transition of a checkpoint, in the thread that writes it. ``when_behind``: what happens if a save by steps is due
    while storage is busy with the two before it: "wait", "skip" it, or "replace" the one that waits. A save by seconds
    is put off until storage is ready. ``snapshot_every_s``: how often the state is copied into memory of the node's
    agent, from which training resumes if all workers die: seconds, "auto" (at least 5 s apart, and at most 1 % of the
    time), or None for saves alone. ``writers``: "auto" has one rank of each node write a part of a large checkpoint, if
    its node sees the same directory; "rank0" does not.
    """

    keep_every: int | None = None
    retention: Retention | None = None
    require_last_save: bool = False
    on_event: EventSink | None = None
    when_behind: str = WhenBehind.WAIT
    snapshot_every_s: float | str | None = AUTO
    writers: str = Writers.AUTO

    def __post_init__(self) -> None:
        one_of(WhenBehind, self.when_behind, "when_behind")
        one_of(Writers, self.writers, "writers")
        every_s = self.snapshot_every_s
        if every_s not in (None, AUTO) and (isinstance(every_s, str) or every_s <= 0):
            raise ConfigError(f"snapshot_every_s is {every_s!r}", hint="give seconds, 'auto', or None")


class OnDifference(StrEnum):
    """What happens to ranks that differ."""

    STOP = "stop"
    HEAL = "heal"
    """They adopt the state that most ranks hold."""


class OnMismatch(StrEnum):
    """What happens to a step in which an audit has found a rank to be wrong."""

    REPORT = "report"
    REPEAT = "repeat"
    """It is undone, and repeated once."""


class OnChanged(StrEnum):
    """What a resumed job does whose optimizer or schedule was made with other settings than the one that saved."""

    WARN = "warn"
    """It goes on with the old ones."""
    RAISE = "raise"


class OnShortage(StrEnum):
    """What happens when a rank has no memory for a step."""

    RAISE = "raise"
    HALVE = "halve"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What a session checks while it trains.

    ``nonfinite``: a non-finite loss or parameter ends the training (``raise``) or is logged (``warn``). After each
    multiple of ``compare_every_steps`` (None: never), and at the end, the parameters of all ranks are compared: where
    they differ the training stops, or with ``on_difference="heal"`` continues with the state that most ranks hold.
    In each step whose number is a multiple of ``audit_every`` (None: none) every rank's first pass through the model is
    repeated on another node and compared bit by bit, after the parameters: see
    :mod:`elastic_trainer.worker.steps.audit`. A rank that is wrong is reported (``on_mismatch="report"``), or in
    place the step is undone and repeated once as well (``repeat``).
    ``out_of_memory``: in place, a step that a rank has no memory for ends the training (``raise``), is repeated with
    half the micro-batch, from then on (``halve``), or passed over (``skip``).
    ``on_changed``: a job that resumes with settings of optimizer or schedule that are not those of the checkpoint, nor
    named in ``allow_changed``, goes on with the checkpoint's and says so (``warn``), or is refused (``raise``).
    """

    nonfinite: str = "raise"
    compare_every_steps: int | None = EVERY_STEPS
    on_difference: str = OnDifference.STOP
    audit_every: int | None = None
    on_mismatch: str = OnMismatch.REPORT
    out_of_memory: str = OnShortage.RAISE
    on_changed: str = OnChanged.WARN

    def __post_init__(self) -> None:
        one_of(OnShortage, self.out_of_memory, "out_of_memory")
        one_of(OnChanged, self.on_changed, "on_changed")
        one_of(OnMismatch, self.on_mismatch, "on_mismatch")
        one_of(OnDifference, self.on_difference, "on_difference")
        if self.nonfinite not in ("raise", "warn"):
            raise ConfigError(f"nonfinite is {self.nonfinite!r}", hint="use 'raise' or 'warn'")
        for name in ("compare_every_steps", "audit_every"):
            every = getattr(self, name)
            if every is not None and every < 1:
                raise ConfigError(f"{name} is {every}", hint="use 1 or more, or None for never")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How the ranks of a session work together.

    ``backend`` is "auto" (NCCL where all ranks are on CUDA devices), "gloo" (also for several processes that share a
    CUDA device) or "nccl". ``stop_timeout_s`` limits how long the ranks may take to agree to stop. ``timeout_s`` limits
    a collective; None: as long as the agent lets a rank do something else, 600 s without an agent.
    """

    backend: str = AUTO
    stop_timeout_s: float = STOP_TIMEOUT_S
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """All options. ``directory`` is a path or URL; None: nothing is saved."""

    directory: str | None
    cadence: Cadence
    retention: Retention
    seed: int
    device: str
    allow_changed: Collection[str]
    saving: SavingOptions
    checks: CheckOptions
    group: GroupOptions

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", hint="it must not be negative")
