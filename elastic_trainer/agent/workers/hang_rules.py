"""Which workers hang, and which of them keep the others waiting. Pure.

A worker that waits for other ranks is a victim: whoever it waits for does something else, or nothing. So each node
finds its own culprits without asking the others. Where all ranks of the round wait, nobody is one: the round is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.ipc.page import WORK, Reading
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.membership.health import NodeHealth
from elastic_trainer.model import Phase

STEPS_PER_LIMIT: Final = 10.0
"""How much longer than the others one step may take for good reason, beside the fixed time."""
NEAR: Final = 0.9
"""The part of one node's limit that another's ranks must have stood still for: their own limits differ a little."""
VICTIMS_WAIT: Final = 0.5
"""The part of the limit that each rank must have spent waiting alone. Who was slow for its own reasons and has just
come to a collective waits as well, for as long as that takes: nobody may take it for the end."""
FRESH_STEPS: Final = 2
"""Steps of a round that may compile something."""
_LONG: Final = (Phase.CHECKPOINT, Phase.EVALUATION, Phase.HEALING)
_DOING: Final = {Phase.DATA: "waiting for samples", Phase.HEALING: "getting its state"}
_NEVER: Final[Mapping[int, float]] = {}


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Seconds without progress after which a worker hangs; 0: never. See the options of the same names."""

    step_s: float
    first_step_s: float
    phase_s: float

    @property
    def least_s(self) -> float:
        """The shortest of them; 0 if there is none."""
        return min((each for each in (self.step_s, self.first_step_s, self.phase_s) if each), default=0.0)


@dataclass(frozen=True, slots=True)
class Hung:
    """A worker without progress for longer than its limit."""

    reading: Reading
    still_s: float
    limit_s: float

    @property
    def waits(self) -> bool:
        """Whether it waits for others: a victim."""
        return self.reading.waits

    @property
    def reason(self) -> str:
        return (
            f"it has made no progress for {self.still_s:.1f} s ({_doing(self.reading.phase)}, behind step"
            f" {self.reading.pulse.step}; it may take {self.limit_s:.1f} s)"
        )


def _doing(phase: Phase) -> str:
    return _DOING.get(phase, f"in {phase}")


def _phase(reading: Reading) -> Phase:
    """What it does, in detail where it makes steps."""
    return reading.phase if reading.pulse.phase in WORK else reading.pulse.phase


def limit_of(reading: Reading, limits: HangLimits) -> float:
    """Seconds that this worker may go without progress in what it is doing; 0: no limit."""
    phase = _phase(reading)
    if phase in _LONG:
        return limits.phase_s
    ends = phase is Phase.ENDING and reading.waits  # some rank may be in one more step, for ever
    if not (phase in WORK or ends) or not limits.step_s:
        return 0.0
    if reading.pulse.fresh < FRESH_STEPS:
        return limits.first_step_s and max(limits.first_step_s, limits.step_s)
    return limits.step_s + STEPS_PER_LIMIT * reading.pulse.step_s


def busy(reading: Reading) -> str:
    """What keeps this worker, though its round is over, in words; empty for one that ought to leave at once.

    No end of a round can interrupt a save, an evaluation, a compilation or what the script does between two steps, nor
    need it: none of them waits for the others. How long they may take :func:`limit_of` says.
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
    """Those without progress for longer than their limit at monotonic time ``now``.

    ``stood``: when the agent went on after it had stood still, and for how long it had: that counts for nobody.
    ``waited``: when each process was last seen to wait for others. What it waited is not its own: a victim that has
    just been freed, and has not moved yet, would be taken for a culprit.
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
    """Whether each rank of ``round_`` is published to wait for others, beyond the limit at which one would be killed.

    ``published`` is by node. A node that does not show all its ranks may have the culprit.
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
    """Since when a worker is seen to do nothing but wait for others."""

    moved_at: float
    since: float

    @classmethod
    def seen(cls, before: Mapping[int, Waiting], waiting: Iterable[Reading], now: float) -> dict[int, Waiting]:
        """By process, those that are ``waiting`` in a look at ``now``; ``before`` is what the last look gave."""
        found = {}
        for reading in waiting:
            known, moved_at = before.get(reading.pid), reading.pulse.moved_at
            found[reading.pid] = known if known is not None and known.moved_at == moved_at else cls(moved_at, now)
        return found
