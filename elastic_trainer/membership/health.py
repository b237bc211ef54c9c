"""What nodes publish about their workers: the status of each rank, and counters.

A node writes its document every few seconds. The document stays when the node leaves, since its counters belong to the
run; only the leased key (``nodes/<node>``) shows whether the node is present.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from elastic_trainer.membership.documents import Document
from elastic_trainer.model import Cause
from elastic_trainer.telemetry.rank import GAUGES, RankGauges
from elastic_trainer.wording import counted, duration

GONE: Final = "_gone"
"""The name under which the summed counters of long-gone nodes are kept (no node can have it)."""


@dataclass(slots=True, kw_only=True)
class RankHealth(RankGauges):
    """One rank as its node's agent sees it. Times are in seconds."""

    local_rank: int
    pid: int
    phase: str
    """A model.Phase."""
    phase_s: float
    """How long it has been in this phase."""
    still_s: float
    """Seconds without progress."""
    device: str = "cpu"
    waits: bool = False
    """Whether it is waiting for other ranks."""
    waits_s: float = 0.0
    """How long it has been observed to only wait."""

    def as_status(self) -> dict[str, Any]:
        """The fields by name; None for unknown values."""
        status = dict(zip(RANK_FIELDS, _VALUES(self), strict=True))
        return status | {gauge.name: gauge.known(status[gauge.name]) for gauge in GAUGES}


RANK_FIELDS: Final = tuple(each.name for each in fields(RankHealth))
_VALUES: Final = attrgetter(*RANK_FIELDS)


def _columns(ranks: Sequence[RankHealth]) -> dict[str, Sequence[Any]]:
    """Columns instead of rows: each name is stored once, as there may be many ranks."""
    return dict(zip(RANK_FIELDS, zip(*map(_VALUES, ranks), strict=True), strict=True)) if ranks else {}


def _rows(stored: Any) -> Any:
    """The inverse of :func:`_columns`; validation drops columns that this version does not know."""
    if not isinstance(stored, dict):
        return stored
    if not all(isinstance(column, list) for column in stored.values()):
        raise ValueError("a column is not a list")
    return [dict(zip(stored, row, strict=True)) for row in zip(*stored.values(), strict=True)]


Ranks = Annotated[tuple[RankHealth, ...], BeforeValidator(_rows), PlainSerializer(_columns)]


class Saved(BaseModel):
    """The last checkpoint that rank 0 saved."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    step: int
    wall: float
    """When it was saved (Unix time of that node)."""
    bytes: int = 0
    duration_s: float = 0.0
    free_bytes: int | None = None
    """Free space left for checkpoints after the save; None if unknown."""


class NodeHealth(Document):
    """See the module. ``counters``: sums over this node's workers since it joined, including those that have ended.

    Names: ``seconds.<phase>``; ``samples``, ``steps``, ``nonfinite_steps``, ``differences``, ``audit_mismatches``;
    ``left`` (the node left on request); ``ended.<cause>`` (rounds whose end this node noticed first); ``save.ok``,
    ``save.failed``, ``load.ok``, ``load.failed``. The histograms ``save_s``, ``load_s``, ``recovery_s.failure``,
    ``recovery_s.planned`` and ``recovery_s.start`` have ``<name>.le.<bound>`` (not cumulative), ``<name>.sum``
    and ``<name>.count``.
    """

    node: str
    host: str = ""
    wall: float
    """When this was written (Unix time of that node; for display, and comparable only with values of the same node)."""
    every_s: float = Field(default=5.0, gt=0.0)
    """Seconds between two writes."""
    metrics: str = ""
    """``scheme://host:port`` of the node's endpoint; empty if it has none that other machines can reach."""
    logs: str = ""
    """Where its output goes (see agent/health/log_place); empty if unknown."""
    round: int = 0
    ranks: Ranks = ()
    counters: Mapping[str, float] = Field(default_factory=dict)
    loss: float | None = None
    """The newest loss; known on the node of rank 0."""
    saved: Saved | None = None
    """The last checkpoint that a worker of this node saved as rank 0."""
    saves_failing: int = 0
    """Its saves that failed since the last one that succeeded."""
    save_interval_s: float = 0.0


class Incident(Document):
    """One event for people: what ended a round and how the run continued, or something else worth knowing.

    The node of the next round's rank 0 writes the record of a round's end, when that round has made its first step or
    the run has ended; until then only the journal has the transitions.
    """

    wall: float
    """When it began (Unix time of the reporting node)."""
    by: str
    cause: Cause | None = None
    kind: str = "round"
    """``round`` (a round ended), ``straggler``, ``checkpoint_failed``, ``nonfinite_loss``, ``ranks_differ``,
    ``audit_mismatch``, ``node_unfit``, ``node_gave_up``, ``run_stopped``, ``worker_died``."""
    open: bool = False
    """The round ended, and no round has followed yet."""
    round: int = 0
    """The round that ended, or in which it happened."""
    next_round: int | None = None
    reason: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes that were lost, joined, left or are slow."""
    ranks: tuple[int, ...] = ()
    world_before: int = 0
    world_after: int = 0
    step: int = 0
    """The last known committed step before it."""
    steps_lost: int = 0
    resumed: bool = True
    """Whether a step of the next round is known: the next round may have ended before its first."""
    before_s: float = 0.0
    """From the last committed step to the forming of the round that ended, if that made no step."""
    detect_s: float = 0.0
    """From the last committed step, or the forming of the round behind it, to the end of the round. 0: not known, or a
    planned change, before which training goes on."""
    regroup_s: float = 0.0
    """From the end of the round to the agreement on the next."""
    resume_s: float = 0.0
    """From that agreement to the next committed step."""

    @property
    def planned(self) -> bool:
        """Whether it is a planned change of the round, and nobody's fault."""
        return self.cause in (Cause.NODE_JOINED, Cause.NODE_LEFT)

    @property
    def total_s(self) -> float | None:
        """How long training stood still, from the last committed step before it to the first one after it.

        None if the one or the other is not known.
        """
        since_known = self.planned or self.detect_s > 0.0
        if self.kind != "round" or self.next_round is None or not self.resumed or not since_known:
            return None
        return self.before_s + self.detect_s + self.regroup_s + self.resume_s

    @property
    def outcome(self) -> str:
        """What it did to training, in sentences; empty for one that ended no round."""
        if self.kind != "round":
            return ""
        if self.next_round is None:
            return "No round has followed yet." if self.open else "The run did not continue after it."
        regroup, resume = f"{duration(self.regroup_s)} to regroup", f"{duration(self.resume_s)} to resume"
        if not self.resumed:
            return f"No step of round {self.next_round} is known; it took {regroup}."
        lost = counted(self.steps_lost, "step was", "steps were") if self.steps_lost else "No step was"
        if (total_s := self.total_s) is None:
            return f"{lost} lost. Nobody knows since when training stood still; it took {regroup}, {resume}."
        hang = self.cause in (Cause.WORKER_HUNG, Cause.STALLED)
        parts = (
            (self.before_s, f"{duration(self.before_s)} in rounds without a step"),
            (self.detect_s, f"{duration(self.detect_s)} until {'the hang' if hang else 'it'} was noticed"),
            (self.regroup_s, regroup),
            (self.resume_s, resume),
        )
        told = [words for seconds, words in parts if seconds]
        split = f": {', '.join(told)}" if len(told) > 1 else ""
        return f"{lost} lost. Training stood still for {duration(total_s)}{split}."


def added_up(counters: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums, by name."""
    total: dict[str, float] = {}
    for each in counters:
        for name, value in each.items():
            total[name] = total.get(name, 0.0) + value
    return total


def goodput(counters: Mapping[str, float]) -> float | None:
    """The share of all rank seconds that went into new steps; None before there are any."""
    seconds = {name: value for name, value in counters.items() if name.startswith("seconds.")}
    total = sum(seconds.values())
    return seconds.get("seconds.training", 0.0) / total if total else None
