"""What a script requests of its session, checked once and frozen."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from elastic_trainer.checkpoint import EventSink, Retention
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import one_of
from elastic_trainer.variables import ENV_REPLAY
from elastic_trainer.worker.comm.placement import AUTO
from elastic_trainer.worker.state.saver import Cadence, WhenBehind, Writers

STOP_TIMEOUT_S = 10.0
EVERY_STEPS = 100
"""How often ranks compare their parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """Less common options for checkpoints."""

    keep_every: int | None = None
    """Also keep those whose step is a multiple of this."""
    retention: Retention | None = None
    """An `elastic_trainer.checkpoint.Retention`, instead of `keep_last` and `keep_every`."""
    require_last_save: bool = False
    """End with exit code 73, on all ranks, where the directory refuses the state at the end of the training; otherwise
    that is logged as `session.unsaved`, and the script goes on behind the `with` block."""
    on_event: EventSink | None = None
    """Called with each `elastic_trainer.checkpoint.Event`: committed, failed, loaded, removed, ..."""
    when_behind: str = WhenBehind.WAIT
    """Where a save by steps is due while storage is busy with the two before it: `'wait'`, `'skip'` it (logged as
    `checkpoint.given_up`, counted as a failed save), or `'replace'` the one that waits. A save by seconds is put off
    until storage is ready."""
    snapshot_every_s: float | str | None = AUTO
    """How often one rank of each node copies the state into memory of the node's agent: seconds, `'auto'` (at least 5 s
    apart, and at most 1 % of the time), or `None` for saves alone. If all workers of a job die, it resumes there."""
    writers: str = Writers.AUTO
    """`'auto'`: of a model with 32 MB of parameters or more, one rank of each node writes a part of the checkpoint,
    where the nodes see the same directory; the state is rank 0's. `'rank0'`: rank 0 writes all of it. Choose that
    where each node has a directory of its own: the others need not copy the state then."""

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
    """What a session checks while it trains."""

    nonfinite: str = "raise"
    """`raise` ends the training when a loss or a parameter is not finite, `warn` logs it and goes on."""
    compare_every_steps: int | None = EVERY_STEPS
    """Compare the parameters of all ranks after each N steps, and at the end; `None`: never."""
    on_difference: str = OnDifference.STOP
    """`stop` ends the training with DifferError where the parameters of ranks differ, `heal` goes on with the state
    that most ranks hold (of two, rank 0's); both log `ranks.differed`."""
    audit_every: int | None = None
    """Look for machines that compute wrong results silently: in each step whose number is a multiple of N the
    parameters of all ranks are compared first, and every rank's first pass through the model is repeated on another
    node and compared bit by bit; where they differ a third rank decides. Costs one pass per audit. Logged as
    `audit.mismatch`, an incident that names ranks and nodes (of two ranks sometimes both); see `on_mismatch`.
    `audit.skipped` and `audit.reduced` say what of a script cannot be repeated or compared. On CUDA it needs
    `torch.use_deterministic_algorithms(True)`. Not for sharded models, stages, several models or optimizers,
    `local_sgd`, `diloco` and `sync_batchnorm`."""
    on_mismatch: str = OnMismatch.REPORT
    """`report`: a wrong result that an audit has found is logged, and trained on. `repeat`, in place: the step is also
    undone on all ranks and repeated, once; ranks with a wrong state receive that of the others. With `--rdzv-conf
    evict_mismatched=true` the agents let the named node go, where one node is named and enough others remain: it
    leaves by a planned change, with exit code 143. Take its machine out of service (on Kubernetes, cordon it), or it
    may come back."""
    out_of_memory: str = OnShortage.RAISE
    """In place, when a rank has no memory for a step (`torch.OutOfMemoryError`): `raise` ends the training; `halve` has
    all ranks leave the step together, empty their caches and repeat it with half the micro-batch, from then on (the
    step loops over `step.micro_batches()`); `skip` passes the batch over by a step without an update. Logged as
    `memory.exhausted` on that rank, `batch.repeated` or `batch.skipped` on all."""
    on_changed: str = OnChanged.WARN
    """Where a resumed job has made optimizer, schedule or scaler with other settings: `warn` goes on with the
    checkpoint's, `raise` refuses it."""

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
    """How the ranks of a session work together."""

    backend: str = AUTO
    """`auto`: NCCL where all ranks are on CUDA devices, else gloo; `gloo`: also for several processes that share a CUDA
    device; `nccl`."""
    stop_timeout_s: float = STOP_TIMEOUT_S
    """How long the ranks may take to agree to stop after SIGTERM, SIGINT or SIGHUP; a rank that saves is given that
    time anew behind the save, up to twelve times in all."""
    timeout_s: float | None = None
    """How long a collective may take; `None`: as long as the node agent lets another rank do something else
    (`step_timeout`, `first_step_timeout` and `phase_timeout` together, and 600 s), and 600 s where there is none."""


class Replay(BaseModel):
    """What ``elastic-trainer replay`` asks of a session: to compute steps again, in a directory of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str
    """Holds a copy of the checkpoint to begin from; in place of the script's."""
    until: int
    """The session stops once this step is committed."""
    without: tuple[int, ...] = ()
    """Numbers of samples that are left out."""


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
    replay: Replay | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", hint="it must not be negative")


def as_asked(options: SessionOptions) -> SessionOptions:
    """``options``, or in a replay those of the replay: nothing is saved but the ledger, each state has its digest."""
    asked = os.environ.get(ENV_REPLAY)
    if not asked:
        return options
    replay = Replay.model_validate_json(asked)
    return replace(
        options,
        directory=replay.directory,
        cadence=Cadence(None, None),
        allow_changed=frozenset({*options.allow_changed, "run"}),
        saving=replace(options.saving, snapshot_every_s=None),
        checks=replace(options.checks, compare_every_steps=1, nonfinite="warn"),
        replay=replay,
    )
