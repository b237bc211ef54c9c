"""A monitor's observations of a run over time: since when its state lasts, its rates, its curves.

All durations are on this monitor's clock: nodes' clocks are never compared. What happened before the monitor started is
unknown, and reported as such.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_trainer.membership.documents import NodeHealth, Saved
from elastic_trainer.monitor.model import state
from elastic_trainer.monitor.model.contents import RunDocuments
from elastic_trainer.monitor.model.curves import Curves, Point, Recorder

RATE_WINDOW_S = 30.0
"""The window of a rate: nodes publish their counts only every few seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations at ``now`` (monotonic seconds) and ``wall`` (Unix time)."""

    now: float = 0.0
    wall: float = 0.0
    state: str = state.GATHERING
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

    def note(self, now: float, count: float | None) -> None:
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
        self._looked = False
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

    def look(self, documents: RunDocuments, now: float, wall: float, *, known: bool = True) -> Observed:
        """Observe ``documents``. Without ``known`` they are outdated, and the curves get a gap."""
        present = state.run_state(documents)
        self._note_state(present, documents.round.number if documents.round is not None else 0, now)
        first = not self._looked
        self._looked = True
        self._note_arrivals(documents, now)
        step, over = state.current_step(documents), present in state.OVER
        stands = not over and (present not in (state.TRAINING, state.CHANGING) or state.held_up(documents))
        step_s = None if stands else state.typical_step_s(documents)
        counted = documents.counters.get("samples")
        if counted is None and documents.progress is not None:
            counted = float(documents.progress.samples)
        if not over:  # a run that has ended keeps its last rates
            self._samples.note(now, counted)
            self._steps.note(now, None if step is None else float(step))
        samples_per_s, steps_per_s = self._samples.per_s(), self._steps.per_s()
        if not documents.closed:
            trains = known and bool(documents.live)
            loss = state.current_loss(documents)
            ranks = state.world_size(documents) if known else None
            self._recorder.note(
                Point(wall, step, loss, step_s, ranks) if trains else Point(wall, None, None, None, ranks)
            )
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

    def _note_state(self, present: str, round_: int, now: float) -> None:
        """A round that was broken and replaced between two looks also starts a new state."""
        if (present, round_) != self._state:
            self._state_since = None if self._state is None else now
            self._state = (present, round_)

    def _note_arrivals(self, documents: RunDocuments, now: float) -> None:
        known, self._told = self._told, {}
        for name, health in documents.health.items():
            before = known.get(name)
            same = before is not None and before[0] is health
            self._told[name] = before if same and before is not None else (health, now)

    def _gathering(self, documents: RunDocuments, present: str, wall: float) -> float:
        if present in (state.STOPPED, state.ABANDONED):
            self._left_wall = wall
        if present not in (state.GATHERING, state.RECOVERING):
            self._gathering_wall = None
            return 0.0
        ended = state.ended_by(documents)
        if ended is not None and ended.wall >= self._left_wall:  # otherwise it waits because nodes have left since
            return ended.wall
        if self._gathering_wall is None:
            self._gathering_wall = wall
        return self._gathering_wall

    def _over(self, documents: RunDocuments, now: float, wall: float) -> float | None:
        if not documents.closed and documents.live:
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
