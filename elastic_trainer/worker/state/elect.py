"""Which state all ranks continue, who gives it, and who receives it. Pure; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.model import StateIdentity


@dataclass(frozen=True, slots=True)
class Election:
    """The state that continues: the rank that gives each shard of it, and the ranks that do not hold it."""

    sources: tuple[int, ...]
    behind: tuple[int, ...]


def elect(states: Sequence[StateIdentity | None], size: int = 1) -> Election | None:
    """The newest state, by round and step, that the ranks hold completely; None if there is none.

    ``states`` is what each rank holds; rank r holds shard r modulo ``size`` of it. A newer state of which nobody holds
    one of the shards is passed over. Where ranks hold different bits of the same shard after the same step, those of
    most ranks count, of the lowest rank in a tie.
    """
    moments = [None if each is None else (each.round, each.step) for each in states]
    for newest in sorted({each for each in moments if each is not None}, reverse=True):
        holders = [
            [rank for rank in range(shard, len(states), size) if moments[rank] == newest] for shard in range(size)
        ]
        if all(holders):
            sources = tuple(_most_common(states, ranks) for ranks in holders)
            behind = tuple(rank for rank, each in enumerate(states) if each != states[sources[rank % size]])
            return Election(sources, behind)
    return None


def _most_common(states: Sequence[StateIdentity | None], ranks: Sequence[int]) -> int:
    counts = Counter(states[rank] for rank in ranks)
    return max(ranks, key=lambda rank: counts[states[rank]])


ShardCopy = tuple[int, int, int, int]
"""A copy of one shard in a node's memory: its state's round and step, the shard, and the number of shards."""


def elect_copies(rows: Sequence[Sequence[ShardCopy]]) -> Mapping[ShardCopy, int]:
    """The newest state whose shards are all in memory somewhere: each copy with the first rank that has it.

    ``rows`` are the copies that each rank knows of. Empty if no state is complete.
    """
    holders: dict[ShardCopy, int] = {}
    for rank, row in enumerate(rows):
        for copy in row:
            holders.setdefault(copy, rank)
    states: dict[tuple[int, int, int], list[ShardCopy]] = {}
    for copy in holders:
        states.setdefault((copy[0], copy[1], copy[3]), []).append(copy)
    newest = max((state for state, copies in states.items() if len(copies) == state[2]), default=None)
    return {copy: holders[copy] for copy in sorted(states[newest])} if newest is not None else {}
