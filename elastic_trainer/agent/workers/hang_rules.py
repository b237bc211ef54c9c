"""Which workers hang, which of them the others wait for, and when a wait for other nodes is too long. Pure.

A worker that waits for other ranks is a victim: the rank that it waits for does something else, or nothing. So each
node finds its own culprits without asking the others. If all ranks of the round wait, none is a culprit: the round is
over. A wrong suspicion of another node costs one step, so it may come early; but it must not recur on a busy machine.
So its time limit follows from the delays of recent answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.ipc.page import WORK, Reading
from elastic_trainer.membership.documents import NodeHealth, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Phase

STEPS_PER_LIMIT: Final = 10.0
"""How many times longer than the others one step may legitimately take, in addition to the fixed time."""
NEAR: Final = 0.9
"""Fraction of one node's limit that other nodes' ranks must have made no progress: limits differ slightly."""
VICTIMS_WAIT: Final = 0.5
"""Fraction of the limit that each rank must have only waited. A slow rank that has just reached a collective also
waits, for as long as the collective takes: that must not count as the end of the round."""
FRESH_STEPS: Final = 2
"""Steps of a round that may compile something."""
_LONG: Final = (Phase.CHECKPOINT, Phase.EVALUATION, Phase.HEALING)
_DOING: Final = {Phase.DATA: "waiting for samples", Phase.HEALING: "receiving its state"}
_NEVER: Final[Mapping[int, float]] = {}


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds without progress after which a worker counts as hung; 0: never. See the options of the same names."""

    step_s: float
    first_step_s: float
    phase_s: float

    @property
    def least_s(self) -> float:
        """The shortest limit; 0 if there is none."""
        return min((each for each in (self.step_s, self.first_step_s, self.phase_s) if each), default=0.0)


@dataclass(frozen=True, slots=True)
class Hung:
    """A worker that has made no progress for longer than its limit."""

    reading: Reading
    still_s: float
    limit_s: float

    @property
    def is_victim(self) -> bool:
        """Whether it waits for others, and so is a victim."""
        return self.reading.waits

    @property
    def reason(self) -> str:
        return (
            f"it has made no progress for {self.still_s:.1f} s ({_doing(self.reading.phase)}, after step"
            f" {self.reading.pulse.step}; its limit is {self.limit_s:.1f} s)"
        )


def _doing(phase: Phase) -> str:
    return _DOING.get(phase, f"in {phase}")


def _phase(reading: Reading) -> Phase:
    """Its phase; while it makes steps, the part of the step."""
    return reading.phase if reading.pulse.phase in WORK else reading.pulse.phase


def limit_of(reading: Reading, limits: HangLimits) -> float:
    """Seconds that this worker may make no progress in its present phase; 0: no limit."""
    phase = _phase(reading)
    if phase in _LONG:
        return limits.phase_s
    ends = phase is Phase.ENDING and reading.waits  # another rank may hang in one more step
    if not (phase in WORK or ends) or not limits.step_s:
        return 0.0
    compiles = phase is not Phase.DATA or not reading.pulse.steps  # a process that made steps has opened its data
    if reading.pulse.fresh < FRESH_STEPS and compiles:
        return limits.first_step_s and max(limits.first_step_s, limits.step_s)
    return limits.step_s + STEPS_PER_LIMIT * reading.pulse.step_s


def busy(reading: Reading) -> str:
    """Why this worker is still in a round that is over, in words; empty for one that should leave at once.

    The end of a round cannot interrupt a save, an evaluation, a compilation or the script's code between two steps, and
    need not: none of them waits for other ranks. :func:`limit_of` bounds their time.
    """
    phase = _phase(reading)
    if reading.waits:
        return ""
    if phase in _LONG or phase is Phase.DATA:
        return _doing(phase)
    if phase not in WORK:
        return ""
    if not reading.inside:
        return "between two steps"
    return "in the first steps of its round, which may compile" if reading.pulse.fresh < FRESH_STEPS else ""


def hung(
    readings: Iterable[Reading],
    limits: HangLimits,
    now: float,
    stood: Sequence[tuple[float, float]] = (),
    waited: Mapping[int, float] = _NEVER,
) -> list[Hung]:
    """The workers that have made no progress for longer than their limit at monotonic time ``now``.

    ``stood``: when the agent resumed after a freeze, and for how long it was frozen; that time does not count.
    ``waited``: when each process was last seen to wait for others. That wait does not count either: otherwise a victim
    that has just been freed and has not moved yet would look like a culprit.
    """
    found = []
    for reading in readings:
        excused_s = sum(seconds for thawed_at, seconds in stood if thawed_at > reading.pulse.moved_at)
        limit_s, still_s = limit_of(reading, limits), reading.still_s(now) - excused_s
        if not reading.waits and reading.pid in waited:
            still_s = min(still_s, now - waited[reading.pid])
        if limit_s and still_s > limit_s:
            found.append(Hung(reading, still_s, limit_s))
    return found


def all_wait(round_: RoundDocument, published: Mapping[str, NodeHealth], limit_s: float) -> bool:
    """Whether every rank of ``round_`` is reported to wait for others, for longer than the limit of a hung worker.

    ``published`` is by node. A node that does not report all its ranks may have the culprit.
    """
    return all(
        _waits(published.get(member.node), round_.number, member.local_world_size, limit_s) for member in round_.members
    )


def _waits(health: NodeHealth | None, number: int, ranks: int, limit_s: float) -> bool:
    if health is None or health.round != number or len(health.ranks) < ranks:
        return False
    return all(
        rank.waits and rank.still_s >= NEAR * limit_s and rank.waits_s >= VICTIMS_WAIT * limit_s
        for rank in health.ranks
    )


@dataclass(frozen=True, slots=True)
class Waiting:
    """Since when a worker has only waited for others."""

    moved_at: float
    since: float

    @classmethod
    def seen(cls, before: Mapping[int, Waiting], waiting: Iterable[Reading], now: float) -> dict[int, Waiting]:
        """By process id, the workers that are ``waiting`` at ``now``; ``before`` is the result of the last look."""
        found = {}
        for reading in waiting:
            known, moved_at = before.get(reading.pid), reading.pulse.moved_at
            found[reading.pid] = known if known is not None and known.moved_at == moved_at else cls(moved_at, now)
        return found


LATE = 3.0
"""The agent was frozen if a turn comes this many times later than planned."""


def starved_s(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Seconds in which a process could do nothing between ``before`` and ``now`` (:func:`queued_s`): the longest wait
    of one of its threads for a CPU."""
    return max((now[each] - before[each] for each in now.keys() & before.keys()), default=0.0)


LEAST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 2.0
STEPS: Final = 3.0
"""How many of its own step times a worker may wait before its agent asks, within these two bounds."""
ANSWER_S: Final = 0.2
"""Minimum time limit for an answer of another node's agent."""
PONG_S: Final = 0.5
"""Minimum time limit for an answer of a worker's control thread to its agent."""
TIMES_LATE: Final = 2.0
"""The limit as a multiple of the longest recent answer. Answers are few and their times have a long tail, so the
maximum says more than the spread."""
TIMES_OWN: Final = 4.0
"""The limit as a multiple of this node's answer to itself at the same time."""
LONGEST_DELAY_S: Final = 1.0
"""An answer that took longer than this does not come from a busy machine but from a frozen process."""
REMEMBERED_S: Final = 60.0
_KEPT: Final = 32
NEIGHBOURS: Final = 4
"""Members before and after a node in the list that it asks: so eight nodes ask each one, however large the round."""


@dataclass(slots=True)
class AnswerDelays:
    """Durations of the recent answers of one node or worker."""

    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def add(self, seconds: float, now: float) -> None:
        """Add an answer that took ``seconds``."""
        if seconds <= LONGEST_DELAY_S:
            self._seen.append((now, seconds))

    def limit_s(self, least_s: float, now: float) -> float:
        """Time limit of the next answer, in seconds."""
        lately = [seconds for at, seconds in self._seen if now - at <= REMEMBERED_S]
        return max(least_s, TIMES_LATE * max(lately, default=0.0))


def patience_s(step_s: float) -> float:
    """How long a worker whose steps take ``step_s`` waits for others before its agent asks their agents, in seconds."""
    return min(LONGEST_WAIT_S, max(LEAST_WAIT_S, STEPS * step_s))


def seeks_others(reading: Reading) -> bool:
    """Whether this worker only waits for others: in a collective, or while a group forms."""
    return reading.waits or reading.phase is Phase.RENDEZVOUS


def needed(document: RoundDocument) -> tuple[RoundMember, ...]:
    """The members without which training cannot continue."""
    if document.state not in (RoundState.ACTIVE, RoundState.DRAINING):
        return ()
    return document.next.members if document.next is not None else document.members


def neighbours(document: RoundDocument, node: str) -> tuple[str, ...]:
    """The nodes that ``node`` asks: its neighbours in the list of members."""
    names = [member.node for member in needed(document)]
    if node not in names:
        return ()
    mine, count = names.index(node), len(names)
    near = [names[(mine + step) % count] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)]
    return tuple(dict.fromkeys(name for name in near if name != node))


def stuck(reading: Reading | None, state: str, silent_s: float, limit_s: float) -> str | None:
    """Why a worker that others wait for is stuck, in words; None if nothing indicates it.

    ``state`` is the kernel's state of its process, ``silent_s`` the seconds that its control thread has not answered.
    A debugger is no fault, and a worker that saves, evaluates, heals or compiles may hold the interpreter for a while.
    """
    if state == "stopped":
        return "its process is stopped"
    busy = reading is None or reading.phase not in WORK or reading.pulse.fresh < FRESH_STEPS
    if state == "traced" or busy or silent_s <= limit_s:
        return None
    return f"it has answered nothing for {silent_s:.1f} s (state: {state})"
