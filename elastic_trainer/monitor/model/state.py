"""The state of a run, from its documents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from statistics import median
from typing import Final

from elastic_trainer.membership.documents import JournalEntry, NodeState, RankHealth, RoundMember, RoundState, RunResult
from elastic_trainer.monitor.model.contents import RunDocuments

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
    round_, live = documents.round, documents.live
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
    live = documents.live
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
    gone = [name for name in expected if name not in documents.live]
    return gone[: max(0, len(expected) - len(documents.live))]


def spares(documents: RunDocuments) -> list[str]:
    """Ready nodes outside a round in effect, except those that wait for their shard group to be complete."""
    if run_state(documents) not in (TRAINING, CHANGING):
        return []
    within, spec = members(documents), documents.spec
    if spec is not None and spec.shard_nodes > 1 and len(within) + spec.shard_nodes <= spec.max_nodes:
        return []
    live = documents.live.items()
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
    awaited = {place for place, rank in ranks.items() if not rank.waits}
    size = documents.round.world_size if documents.round is not None else 0
    if held_up(documents) and len(ranks) == size and 0 < len(awaited) < size:
        return {place: Stall.AWAITED if place in awaited else Stall.WAITS for place in ranks}
    return {place: Stall.STILL for place, rank in ranks.items() if _stands_still(rank)}


def _stands_still(rank: RankHealth) -> bool:
    return rank.phase in AT_WORK and rank.still_s > max(STILL_S, STILL_STEPS * rank.step_s)


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
