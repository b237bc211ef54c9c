"""What is known of a run: its decoded documents, its state, and a monitor's observations over time. Pure.

All durations are on this monitor's clock: nodes' clocks are never compared. What happened before the monitor started is
unknown, and reported as such. Curves have at most a thousand points however long the run takes: when they are full,
every second point is dropped, and from then on points are taken half as often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from statistics import median
from typing import Any, Final, NamedTuple

from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import (
    GONE,
    Departure,
    Incident,
    JournalEntry,
    NodeHealth,
    NodeState,
    RankHealth,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
    Saved,
    Spec,
    added_up,
)
from elastic_trainer.membership.stragglers import Stragglers, find_stragglers


@dataclass(frozen=True)
class RunDocuments:
    """One run as last read. ``journal`` and ``incidents`` hold the newest entries, oldest first.

    Without slots, so that sums over a thousand nodes can be cached.
    """

    run: str
    spec: Spec | None = None
    round: RoundDocument | None = None
    progress: Progress | None = None
    departure: Departure | None = None
    """How the last node left, if it left by itself."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    health: Mapping[str, NodeHealth] = field(default_factory=dict)
    journal: tuple[JournalEntry, ...] = ()
    incidents: tuple[Incident, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Keys that this version cannot read."""
    round_revision: int = 0
    """Mod-revision of the round document; 0: there is none."""
    serial: int = 0
    """Increases when anything of the run changes."""

    @property
    def is_run(self) -> bool:
        return bool(self.spec or self.round or self.nodes or self.unreadable)

    @property
    def closed(self) -> bool:
        return self.round is not None and self.round.state is RoundState.CLOSED

    @cached_property
    def living_nodes(self) -> dict[str, NodeView]:
        """The present nodes, without keys of excluded nodes."""
        ghosts = self.round.ghosts if self.round is not None else ()
        return {name: node for name, node in self.nodes.items() if node.ghost not in ghosts}

    @cached_property
    def counters(self) -> dict[str, float]:
        """The counters summed over all nodes, including those that have left."""
        return added_up(health.counters for health in self.health.values())

    @cached_property
    def happened(self) -> tuple[Incident, ...]:
        """The incidents, the newest first. One fault is one: why a worker died goes into the end of its round."""
        ends = {each.round for each in self.incidents if each.kind == "round" and not each.planned}
        died: dict[int, list[str]] = {}
        for each in self.incidents:
            if each.kind == "worker_died" and each.round in ends:
                died.setdefault(each.round, []).append(each.reason)
        told = []
        for each in sorted(self.incidents, key=lambda each: each.wall, reverse=True):
            if each.kind == "round" and not each.planned:
                why = [reason for reason in died.get(each.round, ()) if reason not in each.reason]
                told.append(each.model_copy(update={"reason": "; ".join([each.reason, *why])}) if why else each)
            elif each.kind != "worker_died" or each.round not in died:
                told.append(each)
        return tuple(told)

    @property
    def last_fault(self) -> Incident | None:
        """The newest incident that is no planned change."""
        return next((each for each in self.happened if not each.planned), None)

    @property
    def first_health(self) -> NodeHealth | None:
        """The health of the node of rank 0, now or in the last round."""
        members = self.round.members if self.round is not None else ()
        return next((self.health.get(member.node) for member in members if member.first_rank == 0), None)

    @cached_property
    def saved(self) -> Saved | None:
        """The last checkpoint: that of rank 0's node, otherwise the one of the highest step that any node reports."""
        first = self.first_health
        if first is not None and first.saved is not None:
            return first.saved
        told = (each.saved for each in self.health.values() if each.saved is not None)
        return max(told, key=lambda saved: saved.step, default=None)

    @property
    def saves_failing(self) -> int:
        """Saves of rank 0's node that failed since the last one that succeeded."""
        first = self.first_health
        return first.saves_failing if first is not None else 0

    def folded(self) -> RunDocuments:
        """The same without the nodes' details, which is kept of a run that is over."""
        total = NodeHealth(node=GONE, wall=0.0, counters=self.counters, saved=self.saved)
        return replace(self, nodes={}, health={GONE: total} if self.health else {})


GATHERING: Final = "gathering"
TRAINING: Final = "training"
CHANGING: Final = "changing"
RECOVERING: Final = "recovering"
STOPPED: Final = "stopped"
"""Its last node left on request: it continues when nodes join."""
ABANDONED: Final = "abandoned"
"""Its last node gave up: it waits until nodes are started."""
SUCCEEDED: Final = "succeeded"
FAILED: Final = "failed"
OVER: Final = (STOPPED, ABANDONED, SUCCEEDED, FAILED)
"""States in which a run has no nodes."""

AT_WORK: Final = ("training", "repeated", "data")
"""Phases in which a rank makes progress every few seconds."""
HELD_STEPS: Final = 3.0
HELD_S: Final = 5.0
"""Training is held up if no rank has made progress for this many steps, and for this long: nodes report every few
seconds."""
STILL_S: Final = 30.0
STILL_STEPS: Final = 10.0
"""A working rank stands still after this many seconds, and this many of its own steps, without progress."""


class Stall(StrEnum):
    """What a rank without progress does to the others."""

    AWAITED = "awaited"
    """The others wait for it."""
    WAITS = "waits"
    """It waits for a rank that is known."""
    STILL = "still"
    """It stands still, and nobody is known to be the reason."""


IN_WORDS: Final[Mapping[str, str]] = {
    Stall.AWAITED: "no step for {}, the others wait for it",
    Stall.WAITS: "waits for {}",
    Stall.STILL: "no step for {}",
}
"""What is said of such a rank; with the time without progress."""


def run_state(documents: RunDocuments) -> str:
    """One of families.RUN_STATES.

    A round without live members does not count: if all of them died at once, no node broke it.
    """
    round_, live = documents.round, documents.living_nodes
    if documents.closed:
        return SUCCEEDED if round_ is not None and round_.result is RunResult.SUCCEEDED else FAILED
    if not live and documents.departure is not None:
        return STOPPED if documents.departure.planned else ABANDONED
    if round_ is None or not live:
        return GATHERING
    if round_.state is RoundState.BROKEN:
        least = documents.spec.min_nodes if documents.spec is not None else 1
        return RECOVERING if len(live) >= least else GATHERING
    return CHANGING if round_.state is RoundState.DRAINING else TRAINING


def world_size(documents: RunDocuments) -> int:
    """Training ranks; 0 while there is no round."""
    trains = run_state(documents) in (TRAINING, CHANGING)
    return documents.round.world_size if trains and documents.round is not None else 0


def ended_by(documents: RunDocuments) -> JournalEntry | None:
    """The transition that ended the newest round (broke or closed it); None while it lasts."""
    round_ = documents.round
    if round_ is None or round_.state not in (RoundState.BROKEN, RoundState.CLOSED):
        return None
    mine = (each for each in documents.journal if (each.round, each.state) == (round_.number, round_.state))
    return next(mine, None)


def members(documents: RunDocuments) -> dict[str, RoundMember]:
    """The present nodes that are members of the newest round in their present life."""
    named = documents.round.members if documents.round is not None else ()
    live = documents.living_nodes
    return {each.node: each for each in named if each.node in live and live[each.node].incarnation == each.incarnation}


def lost_nodes(documents: RunDocuments) -> list[str]:
    """Nodes that the run lost to faults, less those that have replaced them.

    The journal says which nodes have trained together since the last planned change. Nodes that left on request do
    not count.
    """
    if documents.closed or run_state(documents) == STOPPED:
        return []
    asked = {name for name, health in documents.health.items() if health.counters.get("left")}
    wanted: list[str] = []
    planned = True
    for entry in documents.journal:
        if entry.state is RoundState.ACTIVE and (planned or len(entry.nodes) >= len(set(wanted) - asked)):
            wanted = list(entry.nodes)
        planned = entry.state is RoundState.DRAINING
    expected = [name for name in wanted if name not in asked]
    gone = [name for name in expected if name not in documents.living_nodes]
    return gone[: max(0, len(expected) - len(documents.living_nodes))]


def spares(documents: RunDocuments) -> list[str]:
    """Ready nodes outside a round in effect, except those that wait for their shard group to be complete."""
    if run_state(documents) not in (TRAINING, CHANGING):
        return []
    within, spec = members(documents), documents.spec
    if spec is not None and spec.shard_nodes > 1 and len(within) + spec.shard_nodes <= spec.max_nodes:
        return []
    live = documents.living_nodes.items()
    return [name for name, node in live if node.record.state is NodeState.READY and name not in within]


def shard_groups(documents: RunDocuments) -> int:
    """Training groups of several nodes; 0 if each node holds a whole model."""
    size = documents.spec.shard_nodes if documents.spec is not None else 1
    return len(members(documents)) // size if size > 1 and world_size(documents) else 0


def current_step(documents: RunDocuments) -> int | None:
    """The newest known committed step."""
    round_, progress = documents.round, documents.progress
    number = round_.number if round_ is not None else 0
    if progress is not None and progress.round == number:
        return progress.step
    told = [rank.step for each in documents.health.values() if each.round == number for rank in each.ranks]
    known = [*told, *([progress.step] if progress is not None else [])]
    if round_ is not None and round_.last_step is not None:
        known.append(round_.last_step)
    return max(known, default=None)


def current_loss(documents: RunDocuments) -> float | None:
    """The newest loss that is known: progress comes every second, health every few."""
    progress, first = documents.progress, documents.first_health
    number = documents.round.number if documents.round is not None else 0
    if progress is not None and progress.round == number and progress.loss is not None:
        return progress.loss
    if first is not None and first.loss is not None:
        return first.loss
    return progress.loss if progress is not None else None


def typical_step_s(documents: RunDocuments) -> float | None:
    """Seconds of a step of the newest round: the median over ranks, otherwise rank 0's last report."""
    number = documents.round.number if documents.round is not None else 0
    told = [
        rank.step_s for each in documents.health.values() if each.round == number for rank in each.ranks if rank.step_s
    ]
    if told:
        return median(told)
    progress = documents.progress
    return progress.step_time_s or None if progress is not None and progress.round == number else None


def held_up(documents: RunDocuments) -> bool:
    """Whether no rank of the round that is in effect makes steps: all work, or wait, and none has got on for long."""
    ranks = _at_hand(documents)
    step_s = typical_step_s(documents)
    limit_s = STILL_S if step_s is None else max(HELD_S, HELD_STEPS * step_s)  # the first steps may compile
    return bool(ranks) and all(
        rank.still_s > limit_s and (rank.waits or rank.phase in AT_WORK) for rank in ranks.values()
    )


def stalls(documents: RunDocuments) -> Mapping[tuple[str, int], Stall]:
    """The ranks without progress, by node and local rank.

    As in agent/workers/hang_rules, who does not wait while others do is the one that they wait for. That holds only if
    all ranks of the round are known: the one that is missing may be it.
    """
    ranks = _at_hand(documents)
    awaited = {key for key, rank in ranks.items() if not rank.waits}
    size = documents.round.world_size if documents.round is not None else 0
    if held_up(documents) and len(ranks) == size and 0 < len(awaited) < size:
        return {key: Stall.AWAITED if key in awaited else Stall.WAITS for key in ranks}
    return {
        key: Stall.STILL
        for key, rank in ranks.items()
        if rank.phase in AT_WORK and rank.still_s > max(STILL_S, STILL_STEPS * rank.step_s)
    }


def _at_hand(documents: RunDocuments) -> dict[tuple[str, int], RankHealth]:
    """The ranks of the round in effect that its present members report, by node and local rank."""
    if run_state(documents) not in (TRAINING, CHANGING) or documents.round is None:
        return {}
    return {
        (name, rank.local_rank): rank
        for name, member in members(documents).items()
        if (told := documents.health.get(name)) is not None and told.round == documents.round.number
        for rank in told.ranks
        if rank.local_rank < member.local_world_size
    }


def save_interval_s(documents: RunDocuments) -> float:
    """Configured interval between checkpoints; 0: not by time."""
    first = documents.first_health
    if first is not None and first.save_interval_s:
        return first.save_interval_s
    return max((each.save_interval_s for each in documents.health.values()), default=0.0)


def straggling(documents: RunDocuments) -> Stragglers:
    """The stragglers of the newest round."""
    return find_stragglers(
        {
            member.first_rank + rank.local_rank: rank.compute_s
            for name, member in members(documents).items()
            if name in documents.health
            for rank in documents.health[name].ranks
            if rank.local_rank < member.local_world_size
        }
    )


LIMIT = 1000
FIRST_EVERY_S = 1.0


class Point(NamedTuple):
    """The figures at one moment. ``wall`` is the monitor's Unix time."""

    wall: float
    step: int | None
    loss: float | None
    step_s: float | None
    world_size: int | None


Curves = Mapping[str, list[Any]]
"""The points by column, oldest first."""


class Recorder:
    """Collects the points of one run."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._every_s = FIRST_EVERY_S
        self._points: list[Point] = []

    def offer(self, point: Point) -> None:
        """Take ``point`` if one is due, or if the ranks have changed, which could be missed between two points."""
        last = self._points[-1] if self._points else None
        changed = last is not None and last.world_size != point.world_size
        if last is not None and not changed and 0 <= point.wall - last.wall < self._every_s:
            return
        self._points.append(point)
        while len(self._points) > self._limit:
            self._every_s *= 2
            self._points = [*self._points[:-1:2], self._points[-1]]

    def curves(self) -> Curves:
        columns = zip(*self._points, strict=True) if self._points else [()] * len(Point._fields)
        return dict(zip(Point._fields, map(list, columns), strict=True))


RATE_WINDOW_S = 30.0
"""The window of a rate: nodes publish their counts only every few seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations at ``now`` (monotonic seconds) and ``wall`` (Unix time)."""

    now: float = 0.0
    wall: float = 0.0
    state: str = GATHERING
    state_since: float | None = None
    """When the run entered its state; None if that was before the first look."""
    gathering_since_wall: float = 0.0
    """When the present rendezvous started (Unix time); 0 while ranks train, and when the run is over."""
    over_s: float | None = None
    """Seconds that the run has been over or without nodes."""
    arrived: Mapping[str, float] = field(default_factory=dict)
    """When the newest health document of each node was first seen; unknown at the first look."""
    saved_s: float | None = None
    """The age of the last checkpoint."""
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    step_s: float | None = None
    curves: Curves = field(default_factory=lambda: Recorder().curves())


class Rate:
    """The rate of a count: between the first and the last of its changes in half a minute.

    It does not extend to the present, as nodes publish counts only every few seconds; but a count that does not change
    in the whole window has the rate 0.
    """

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._changes: deque[tuple[float, float]] = deque()
        self._now = 0.0

    def observe(self, now: float, count: float | None) -> None:
        """The present count is ``count``; a count that is smaller than before starts over."""
        self._now, changes = now, self._changes
        if count is None or (changes and count < changes[-1][1]):
            changes.clear()
        if count is not None and (not changes or count > changes[-1][1]):
            changes.append((now, count))
        while len(changes) > 1 and self._is_old(changes[0]) and (len(changes) > 2 or self._is_old(changes[-1])):
            changes.popleft()

    def per_s(self) -> float | None:
        """The rate; None while it is unknown."""
        if len(self._changes) < 2:
            return 0.0 if self._changes and self._is_old(self._changes[0]) else None
        (start, low), (end, high) = self._changes[0], self._changes[-1]
        return (high - low) / (end - start)

    def _is_old(self, change: tuple[float, float]) -> bool:
        return self._now - change[0] > self._window_s


class Observer:
    """Observes one run repeatedly, in one thread."""

    def __init__(self) -> None:
        self._state: tuple[str, int] | None = None
        self._state_since: float | None = None
        self._gathering_wall: float | None = None
        self._left_wall = 0.0
        """When the run was last seen without nodes because they had left by themselves."""
        self._over_since: float | None = None
        self._told: dict[str, tuple[NodeHealth, float]] = {}
        self._saved: tuple[Saved, float] | None = None
        self._samples, self._steps = Rate(), Rate()
        self._recorder = Recorder()

    def observe(self, documents: RunDocuments, now: float, wall: float, *, known: bool = True) -> Observed:
        """Observe ``documents``. Without ``known`` they are outdated, and the curves get a gap."""
        present = run_state(documents)
        at = present, documents.round.number if documents.round is not None else 0
        first = self._state is None
        if at != self._state:  # a round that was broken and replaced between two looks also starts a new state
            self._state, self._state_since = at, None if first else now
        known_of, self._told = self._told, {}
        for name, health in documents.health.items():
            before = known_of.get(name)
            self._told[name] = before if before is not None and before[0] is health else (health, now)
        step, over = current_step(documents), present in OVER
        stands = not over and (present not in (TRAINING, CHANGING) or held_up(documents))
        step_s = None if stands else typical_step_s(documents)
        counted = documents.counters.get("samples")
        if counted is None and documents.progress is not None:
            counted = float(documents.progress.samples)
        if not over:  # a run that has ended keeps its last rates
            self._samples.observe(now, counted)
            self._steps.observe(now, None if step is None else float(step))
        samples_per_s, steps_per_s = self._samples.per_s(), self._steps.per_s()
        if not documents.closed:
            ranks = world_size(documents) if known else None
            figures = (
                (step, current_loss(documents), step_s) if known and documents.living_nodes else (None, None, None)
            )
            self._recorder.offer(Point(wall, *figures, ranks))
        return Observed(
            now=now,
            wall=wall,
            state=present,
            state_since=self._state_since,
            gathering_since_wall=self._gathering(documents, present, wall),
            over_s=self._over(documents, now, wall),
            arrived={} if first else {name: at for name, (_, at) in self._told.items()},
            saved_s=self._saved_age(documents, now, wall),
            samples_per_s=0.0 if stands and samples_per_s is not None else samples_per_s,
            steps_per_s=0.0 if stands and steps_per_s is not None else steps_per_s,
            step_s=step_s,
            curves=self._recorder.curves(),
        )

    def _gathering(self, documents: RunDocuments, present: str, wall: float) -> float:
        if present in (STOPPED, ABANDONED):
            self._left_wall = wall
        if present not in (GATHERING, RECOVERING):
            self._gathering_wall = None
            return 0.0
        ended = ended_by(documents)
        if ended is not None and ended.wall >= self._left_wall:  # otherwise it waits because nodes have left since
            return ended.wall
        if self._gathering_wall is None:
            self._gathering_wall = wall
        return self._gathering_wall

    def _over(self, documents: RunDocuments, now: float, wall: float) -> float | None:
        if not documents.closed and documents.living_nodes:
            self._over_since = None
            return None
        if self._over_since is None:
            # For a run that was over before the first look, use the time of its last transition. That is another
            # node's clock, but it only decides when the run is forgotten.
            last = documents.journal[-1].wall if documents.journal else wall
            self._over_since = now - (max(0.0, wall - last) if self._state_since is None else 0.0)
        return now - self._over_since

    def _saved_age(self, documents: RunDocuments, now: float, wall: float) -> float | None:
        saved = documents.saved
        if saved is None:
            return None
        if self._saved is None or self._saved[0] != saved:
            before = max(0.0, wall - saved.wall) if self._saved is None else 0.0
            self._saved = (saved, now - before)
        return now - self._saved[1]
