"""The metrics: each declared once, with its kind, labels and exporter.

Exporters build their samples from these, and a test compares the rules, alerts and dashboards in ``deploy/`` with them.
All names begin with ``elastic_trainer_``. The run is a label, the round is a value: a label per round would leave dead
series. All values of an enumerated label exist from the start, so that their rates exist.

The gauges of a rank are fields of :class:`RankGauges`: each appears in the heartbeat page (``ipc/page.py``), in its
node's health document (``membership/documents.py``), in ``/api/runs/<run>``, in the metrics of the node's endpoint, and
in the tables of ``elastic-trainer status`` and the status page. To add one, declare it here and set it in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import median
from typing import Any, Final

from elastic_trainer.model import Advice, Cause, Culprit, Phase

PREFIX: Final = "elastic_trainer_"


class MetricKind(StrEnum):
    """The Prometheus type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class MetricSource(StrEnum):
    """The exporter of a metric."""

    NODE = "node"
    """The agent of each node (the worker itself, if it has no agent)."""
    MONITOR = "monitor"
    """``elastic-trainer monitor``, from the store."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``name`` is without the prefix and, for counters, without ``_total`` (for info without ``_info``)."""

    name: str
    kind: MetricKind
    source: MetricSource
    text: str
    labels: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All values of those labels that have a closed set."""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in queries (for a histogram without ``_bucket``, ``_sum``, ``_count``)."""
        suffix = {MetricKind.COUNTER: "_total", MetricKind.INFO: "_info"}.get(self.kind, "")
        return f"{PREFIX}{self.name}{suffix}"


RANK: Final = ("run", "rank")
RUN: Final = ("run",)
NODE: Final = ("run", "node")


class Unit(StrEnum):
    """The unit in which a number is displayed."""

    COUNT = "count"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True)
class Gauge:
    """Name, display and export of one field of a rank."""

    name: str
    title: str
    unit: Unit
    metric: Family
    wide: bool
    """Whether narrow screens omit its column."""
    of_node: Callable[[Iterable[float]], float]
    """Aggregates the values of all ranks of a node."""
    zero: bool
    """Whether 0 is a value; otherwise 0 means unknown."""

    def known(self, value: Any) -> Any:
        return value if self.zero else value or None


def _shown(
    default: float,
    metric: str,
    text: str,
    title: str,
    unit: Unit = Unit.COUNT,
    *,
    wide: bool = True,
    of_node: Callable[[Iterable[float]], float] = median,
    zero: bool = False,
) -> Any:
    """A field of :class:`RankGauges`."""
    family = Family(metric, MetricKind.GAUGE, MetricSource.NODE, text, RANK)
    shown = {"title": title, "unit": unit, "metric": family, "wide": wide, "of_node": of_node, "zero": zero}
    return field(default=default, metadata=shown)


@dataclass(slots=True)
class RankGauges:
    """The gauges of a rank; its worker updates them in place."""

    rank: int = -1
    """-1 before it has joined a round."""
    step: int = _shown(0, "step", "The last step that this rank committed.", "Step", of_node=min, zero=True)
    """The last committed step of the job: that of the state which this rank holds."""
    step_s: float = _shown(
        0.0, "step_duration_seconds", "Duration of a step, smoothed.", "Step time", Unit.SECONDS, wide=False
    )
    compute_s: float = _shown(
        0.0,
        "compute_duration_seconds",
        "Duration of a step without the wait for other ranks, smoothed: shows a slow rank.",
        "Computing",
        Unit.SECONDS,
    )
    threads: int = _shown(0, "threads", "Threads of this rank's process.", "Threads")


GAUGES: Final = tuple(Gauge(each.name, **each.metadata) for each in fields(RankGauges) if each.metadata)
"""In the order of their columns."""


__all__ = ["FAMILIES", "PREFIX", "RANK", "Family", "MetricKind", "MetricSource"]

PHASES: Final = tuple(str(each) for each in Phase)
CAUSES: Final = tuple(str(each) for each in Cause)
NODE_STATES: Final = ("warming", "ready", "draining", "finishing", "done")
RUN_STATES: Final = (
    *("gathering", "training", "changing", "recovering"),
    *("stopped", "abandoned", "succeeded", "failed"),
)
OUTCOMES: Final = RUN_STATES[-2:]
OPERATIONS: Final = ("save", "load")
RESULTS: Final = ("ok", "failed")
BOUNDS: Final = ("min", "max")
RECOVERIES: Final = ("failure", "planned", "start")
MEMORY: Final = ("allocated", "reserved")
SAVE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RECOVERY_BUCKETS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0)


Values = Mapping[str, tuple[str, ...]]
NONE: Final[Values] = {}


_GAUGE, _COUNTER, _HISTOGRAM = MetricKind.GAUGE, MetricKind.COUNTER, MetricKind.HISTOGRAM


def _rank(
    name: str, text: str, kind: MetricKind = _GAUGE, labels: tuple[str, ...] = (), values: Values = NONE
) -> Family:
    return Family(name, kind, MetricSource.NODE, text, (*RANK, *values, *labels), values)


def _node(name: str, text: str, kind: MetricKind = _GAUGE) -> Family:
    return Family(name, kind, MetricSource.NODE, text, NODE)


def _run(
    name: str, text: str, kind: MetricKind = _GAUGE, values: Values = NONE, buckets: tuple[float, ...] = ()
) -> Family:
    return Family(name, kind, MetricSource.MONITOR, text, (*RUN, *values), values, buckets)


_OF_RANKS: Final = [each.metric for each in GAUGES]
STEP, STEP_DURATION, COMPUTE_DURATION = _OF_RANKS[:3]

RANK_INFO = _rank(
    "rank",
    "Identity of a rank: its node, device and versions.",
    MetricKind.INFO,
    labels=("node", "local_rank", "device", "torch", "version"),
)
LAST_STEP = _rank(
    "last_step_timestamp_seconds", "When it committed that step (Unix time); before the first, when it started."
)
PHASE = _rank("phase", "1 for the present phase of this rank, 0 for all others.", values={"phase": PHASES})
NONFINITE = _rank("nonfinite_steps", "Checks of the loss that found it NaN or infinite.", _COUNTER)
GPU_MEMORY = _rank("gpu_memory_bytes", "Memory of this rank's device.", values={"kind": MEMORY})

STORE_ERRORS = _node("store_errors", "Requests to the store that failed.", _COUNTER)
STORE_SUCCESS = _node(
    "store_last_success_timestamp_seconds",
    "When the store last answered this node and accepted its write (Unix time).",
)
WORKERS_KILLED = _node("workers_killed", "Workers that this node's agent has killed.", _COUNTER)

WORLD_SIZE = _run("world_size", "Ranks in the present round; 0 while there is none.")
NODES = _run("nodes", "Present nodes, by state.", values={"state": NODE_STATES})
NODES_LIMIT = _run("nodes_limit", "The bounds of --nnodes.", values={"bound": BOUNDS})
ROUND = _run("round", "The number of the newest round.")
RUN_STATE = _run("run_state", "1 for the present state of the run, 0 for all others.", values={"state": RUN_STATES})
RUN_ENDED = _run(
    "run_ended_timestamp_seconds",
    "When the run was closed (Unix time of the node that closed it), by result.",
    values={"outcome": OUTCOMES},
)
RENDEZVOUS_START = _run(
    "rendezvous_start_timestamp_seconds", "When the present rendezvous started (Unix time); 0 while ranks train."
)
RESTARTS = _run("restarts", "Rounds that ended, by cause.", _COUNTER, values={"reason": CAUSES})
RECOVERY = _run(
    "recovery_seconds",
    "How long training stood still: from the last committed step of a round to the first of the next.",
    _HISTOGRAM,
    values={"kind": RECOVERIES},
    buckets=RECOVERY_BUCKETS,
)
TIME = _run("time_seconds", "Time of all ranks together, by phase.", _COUNTER, values={"phase": PHASES})
NONFINITE_LOSSES = _run(
    "nonfinite_losses",
    "Checks of the loss that found it NaN or infinite, over all ranks, including ranks that ended because of it.",
    _COUNTER,
)
DIFFERENCES = _run("parameter_differences", "Comparisons that found ranks with different parameters.", _COUNTER)
AUDIT_MISMATCHES = _run(
    "audit_mismatches", "Audits that found ranks computing wrong results, by rank or pair.", _COUNTER
)
VERDICTS = _run(
    "verdicts",
    "Incidents that were judged, by what failed and what to do.",
    _COUNTER,
    values={"culprit": tuple(map(str, Culprit)), "advice": tuple(map(str, Advice))},
)
SAMPLES = _run("samples", "Samples trained on, including repeated ones.", _COUNTER)
LOSS = _run("loss", "The newest known loss.")
PROGRESS = _run("committed_step", "The newest committed step that rank 0's node has published.")
CHECKPOINT_SUCCESS = _run("checkpoint_last_success_timestamp_seconds", "When a checkpoint was last saved (Unix time).")
CHECKPOINT_INTERVAL = _run("checkpoint_interval_seconds", "Configured interval between checkpoints; 0: not by time.")
CHECKPOINTS = _run(
    "checkpoints", "Checkpoints saved and loaded.", _COUNTER, values={"op": OPERATIONS, "result": RESULTS}
)
CHECKPOINT_DURATION = _run(
    "checkpoint_duration_seconds",
    "Duration of saving and loading.",
    _HISTOGRAM,
    values={"op": OPERATIONS},
    buckets=SAVE_BUCKETS,
)
CHECKPOINT_FREE = _run("checkpoint_free_bytes", "Free space where checkpoints are saved, after the last one.")
CHECKPOINT_BYTES = _run("checkpoint_bytes", "The size of the last checkpoint.")
NODES_LOST = _run("nodes_lost", "Nodes that the run lost to faults and that have not been replaced.")
NODES_SPARE = _run("nodes_spare", "Nodes that are ready but in no round: each can replace a lost node at once.")
SHARD_GROUPS = _run("shard_groups", "Shard groups of several nodes in the round; 0: nodes hold whole models.")
STRAGGLERS = _run("stragglers", "Ranks that compute much longer than the others.")
MONITOR_STORE = Family(
    "monitor_store_last_success_timestamp_seconds",
    MetricKind.GAUGE,
    MetricSource.MONITOR,
    "When the monitor last read the store (Unix time).",
)

FAMILIES: Final = (
    *_OF_RANKS,
    *(each for each in list(globals().values()) if isinstance(each, Family) and each not in _OF_RANKS),
)
"""All metrics."""
