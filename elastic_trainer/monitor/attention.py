"""What needs attention in a run: one list of reasons, the worst first. Pure.

The list of runs and ``status`` show the words of each reason, the page of a run its sentence, ``/api`` both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from elastic_trainer.membership.documents import NodeState, RoundState
from elastic_trainer.model import Advice
from elastic_trainer.monitor import state
from elastic_trainer.monitor.state import Observed, RunDocuments, Stall
from elastic_trainer.wording import counted, duration, fixed, named

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
listed: Final = partial(named, most=4)
"""``a, b, c, d and 12 more``."""
_DOING: Final = {"repeated": "repeating lost steps", "data": "waiting for data"}


@dataclass(frozen=True, slots=True)
class Concern:
    """``look``: bad (the run does not train, or its state is at risk) or warn. ``sentence`` says it in full."""

    look: str
    words: str
    sentence: str


def concerns(documents: RunDocuments, seen: Observed) -> tuple[Concern, ...]:
    """All concerns; none of a run that has succeeded or was stopped."""
    if seen.state == state.FAILED:
        return (Concern("bad", "failed", "The run has failed."),) if (seen.over_s or 0.0) <= OLD_S else ()
    if seen.state in (state.SUCCEEDED, state.STOPPED):
        return ()
    found = [*_nodes(documents, seen), *_ranks(documents), *_saves(documents, seen), *_loop(documents, seen)]
    found += _at_fault(documents)
    if keys := documents.unreadable:
        sentence = f"{counted(len(keys), 'document is', 'documents are')} of another version: {listed(keys)}."
        found.append(Concern("warn", "keys of another version", sentence))
    return tuple(sorted(found, key=lambda each: ORDER.index(each.look)))


def _nodes(documents: RunDocuments, seen: Observed) -> list[Concern]:
    """Nodes that are too few, gone, lost or silent, and rounds that do not come."""
    if seen.state == state.ABANDONED:
        left = documents.departure
        why = f"{left.node} was the last and gave up: {left.reason} (exit code {left.exit_code})" if left else "left"
        return [Concern("bad", "abandoned: its last node gave up", f"Node {why}. Start nodes to continue.")]
    live, round_ = documents.living_nodes, documents.round
    least = documents.spec.min_nodes if documents.spec is not None else 1
    members = round_.members if round_ is not None and round_.state is not RoundState.DRAINING else ()
    gone = [each.node for each in members if each.node not in live]
    lost = [name for name in state.lost_nodes(documents) if name not in gone]
    without = f" Gone: {listed(_heard([*gone, *lost], seen))}." if gone or lost else ""
    found = []
    lasted_s = seen.wall - seen.gathering_since_wall if seen.gathering_since_wall else 0.0
    if seen.state_since is not None:
        lasted_s = seen.now - seen.state_since
    if len(live) < least:
        look = "bad" if round_ is not None else "warn"  # before the first round nodes are still starting
        sentence = f"{counted(len(live), 'node is', 'nodes are')} present, training needs {least:,}.{without}"
        found.append(Concern(look, f"{len(live)} of {counted(least, 'node')} needed", sentence))
    elif seen.state in (state.GATHERING, state.RECOVERING) and lasted_s > REGROUP_S:
        found.append(Concern("bad", "no round comes", f"No round has formed for {duration(lasted_s)}.{without}"))
    elif gone:
        sentence = f"{counted(len(gone), 'node is', 'nodes are')} gone: {listed(_heard(gone, seen))}."
        found.append(Concern("bad", f"{len(gone)} gone", sentence))
    elif lost:
        sentence = f"{counted(len(lost), 'node was', 'nodes were')} lost and not replaced: {listed(lost)}."
        found.append(Concern("warn", f"{len(lost)} lost, not replaced", sentence))
    there = [name for name, node in live.items() if node.record.state is not NodeState.DONE]
    if silent := [name for name in there if seen.now - seen.arrived.get(name, seen.now) > UNHEARD_S]:
        sentence = f"{counted(len(silent), 'node is', 'nodes are')} silent: {listed(_heard(silent, seen))}."
        found.append(Concern("warn", f"{len(silent)} silent", sentence))
    return found


def _heard(names: Iterable[str], seen: Observed) -> list[str]:
    return [
        f"{name} (heard {duration(seen.now - seen.arrived[name])} ago)" if name in seen.arrived else name
        for name in names
    ]


def _ranks(documents: RunDocuments) -> list[Concern]:
    """Ranks that make no progress, and those that compute slowly."""
    members, stalls = state.members(documents), state.stalls(documents)
    judgment = state.straggling(documents)
    awaited, still, slow = [], [], []
    for node, health in documents.health.items():
        member = members.get(node)
        for rank in health.ranks if member is not None else ():
            if member is None or rank.local_rank >= member.local_world_size:
                continue
            number, stall = member.first_rank + rank.local_rank, stalls.get((node, rank.local_rank))
            who = f"rank {number} on {node}"
            told = f"{who} ({_DOING.get(str(rank.phase), rank.phase)}, for {duration(rank.still_s)})"
            if stall is Stall.AWAITED:
                awaited.append((who, told))
            elif stall is Stall.STILL:
                still.append(told)
            elif stall is None and number in judgment.ranks:
                times = judgment.slowdown(rank.compute_s)
                slow.append(who if times is None else f"{who} ({fixed(times, 1)} times as long)")
    found = []
    if still:
        sentence = f"{counted(len(still), 'rank makes', 'ranks make')} no progress: {listed(still)}."
        found.append(Concern("bad", f"{len(still)} standing still", sentence))
    if awaited:
        holds = "holds" if len(awaited) == 1 else f"and {len(awaited) - 1} more hold"
        who = counted(len(awaited), "rank makes", "ranks make")
        them = "it" if len(awaited) == 1 else "them"
        sentence = f"{who} no progress, the others wait for {them}: {listed([told for _, told in awaited])}."
        found.append(Concern("bad", f"{awaited[0][0]} {holds} up the others", sentence))
    if slow:
        sentence = f"{counted(len(slow), 'rank is', 'ranks are')} slow: {listed(slow)}."
        found.append(Concern("warn", f"{len(slow)} slow", sentence))
    return found


def _saves(documents: RunDocuments, seen: Observed) -> list[Concern]:
    """Failed saves count until one succeeds."""
    every_s = state.save_interval_s(documents)
    late = bool(every_s) and seen.saved_s is not None and seen.saved_s > OVERDUE * every_s
    if failing := documents.saves_failing:
        look = "bad" if late or documents.saved is None else "warn"
        return [_whole(look, "the last save failed" if failing == 1 else f"the last {failing} saves failed")]
    if not late or seen.saved_s is None or seen.state != state.TRAINING:
        return []
    sentence = f"The last checkpoint is {duration(seen.saved_s)} old; one is due every {duration(every_s)}."
    return [Concern("warn", "checkpoint late", sentence)]


def _loop(documents: RunDocuments, seen: Observed) -> list[Concern]:
    """Rounds that break again and again. Walls are those of nodes: good enough for a span of minutes."""
    broke = [e for e in documents.journal if e.state is RoundState.BROKEN and seen.wall - e.wall < LOOP_S]
    if len(broke) < LOOP:
        return []
    ends = [each.step for each in documents.happened if each.kind == "round" and not each.planned][:LOOP]
    stuck = len(ends) == LOOP and max(ends) == min(ends) >= (state.current_step(documents) or 0)
    words = f"{len(broke)} rounds broke in the last {duration(LOOP_S)}{', without a new step between' if stuck else ''}"
    return [_whole("bad" if stuck else "warn", words)]


def _at_fault(documents: RunDocuments) -> list[Concern]:
    """Nodes that a verdict on the newest fault wants to be left out, and that are still there."""
    last = documents.last_fault
    verdict = last.verdict if last is not None else None
    there = [name for name in verdict.nodes if name in documents.living_nodes] if verdict is not None else []
    if verdict is None or verdict.advice is not Advice.LEAVE_OUT or not there:
        return []
    return [Concern("warn", f"{listed(there)} at fault", verdict.sentence)]


def _whole(look: str, words: str) -> Concern:
    """One of which there is no more to say than its words."""
    return Concern(look, words, f"{words[:1].upper()}{words[1:]}.")
