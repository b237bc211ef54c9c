"""The concerns of a run that need attention, in a few words each, the worst first. Pure.

The list of runs, ``status`` and the API show them; the page of a run has more detail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from elastic_trainer.membership.documents import RoundState
from elastic_trainer.monitor import state
from elastic_trainer.monitor.state import Observed, RunDocuments
from elastic_trainer.wording import counted, duration

UNHEARD_S: Final = 30.0
"""A node that is silent for this long needs attention."""
OVERDUE: Final = 2.0
"""A checkpoint this many intervals old is late."""
REGROUP_S: Final = 60.0
"""A run that has not formed its next round after this long needs attention."""
LOOP: Final = 3
LOOP_S: Final = 900.0
"""A run of which so many rounds broke within this time needs attention, even if it recovered each time."""
OLD_S: Final = 24 * 3600.0
"""A run that failed longer ago needs no attention: it stays among the ended runs until it is forgotten."""
ORDER: Final = ("bad", "warn")


@dataclass(frozen=True, slots=True)
class Concern:
    """``look``: bad (the run does not train, or its state is at risk) or warn.

    ``whole``: whether the page of a run has no more to say of it than these words.
    """

    look: str
    words: str
    whole: bool = False


def concerns(documents: RunDocuments, seen: Observed, slow: int) -> tuple[Concern, ...]:
    """All concerns; ``slow``: the number of stragglers."""
    if seen.state == state.FAILED:
        return (Concern("bad", "failed"),) if (seen.over_s or 0.0) <= OLD_S else ()
    if seen.state in (state.SUCCEEDED, state.STOPPED):
        return ()
    found = [*_membership(documents, seen), *_ranks(documents, slow), *_saves(documents, seen), *_loop(documents, seen)]
    if documents.unreadable:
        found.append(Concern("warn", "keys of another version"))
    return tuple(sorted(found, key=lambda each: ORDER.index(each.look)))


def _membership(documents: RunDocuments, seen: Observed) -> list[Concern]:
    if seen.state == state.ABANDONED:
        return [Concern("bad", "abandoned: its last node gave up")]
    live, round_ = len(documents.live), documents.round
    least = documents.spec.min_nodes if documents.spec is not None else 1
    found = []
    if live < least:
        look = "bad" if round_ is not None else "warn"  # before the first round nodes are still starting
        found.append(Concern(look, f"{live} of {counted(least, 'node')} needed"))
    elif seen.state in (state.GATHERING, state.RECOVERING) and _lasted(seen) > REGROUP_S:
        found.append(Concern("bad", "no round comes"))
    elif lost := state.lost_nodes(documents):
        found.append(Concern("warn", f"{len(lost)} lost, not replaced"))
    silent = sum(1 for name in documents.live if seen.now - seen.arrived.get(name, seen.now) > UNHEARD_S)
    if silent:
        found.append(Concern("warn", f"{silent} silent"))
    return found


def _lasted(seen: Observed) -> float:
    if seen.state_since is not None:
        return seen.now - seen.state_since
    return seen.wall - seen.gathering_since_wall if seen.gathering_since_wall else 0.0


def _ranks(documents: RunDocuments, slow: int) -> list[Concern]:
    stalls, first = state.stalls(documents), state.members(documents)
    awaited = [
        f"{first[node].first_rank + local} on {node}"
        for (node, local), how in stalls.items()
        if how is state.Stall.AWAITED
    ]
    still = sum(how is state.Stall.STILL for how in stalls.values())
    found = [Concern("bad", f"{still} standing still")] if still else []
    if awaited:
        others = f" and {len(awaited) - 1} more hold" if len(awaited) > 1 else " holds"
        found.append(Concern("bad", f"rank {awaited[0]}{others} up the others"))
    return [*found, Concern("warn", f"{slow} slow")] if slow else found


def _loop(documents: RunDocuments, seen: Observed) -> list[Concern]:
    """Walls are those of nodes: good enough for a span of minutes."""
    broke = [e for e in documents.journal if e.state is RoundState.BROKEN and seen.wall - e.wall < LOOP_S]
    if len(broke) < LOOP:
        return []
    ends = [each.step for each in documents.happened if each.kind == "round" and not each.planned][:LOOP]
    stuck = len(ends) == LOOP and max(ends) == min(ends) >= (state.current_step(documents) or 0)
    words = f"{len(broke)} rounds broke in the last {duration(LOOP_S)}{', without a new step between' if stuck else ''}"
    return [Concern("bad" if stuck else "warn", words, True)]


def _saves(documents: RunDocuments, seen: Observed) -> list[Concern]:
    """Failed saves count until one succeeds."""
    every = max((each.save_interval_s for each in documents.health.values()), default=0.0)
    late = bool(every) and seen.saved_s is not None and seen.saved_s > OVERDUE * every
    if failing := documents.saves_failing:
        look = "bad" if late or documents.saved is None else "warn"
        return [Concern(look, "the last save failed" if failing == 1 else f"the last {failing} saves failed", True)]
    return [Concern("warn", "checkpoint late")] if late and seen.state == state.TRAINING else []
