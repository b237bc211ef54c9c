"""The protocol under random faults on virtual time: no schedule breaks an invariant.

``tests/integration/test_planted_faults.py`` shows that faults in the code are found.
``python -m tests.simulation SEED`` repeats one schedule with its trace.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.world import play

SCHEDULES, SHARDS = 2000, 8
PER_SHARD = SCHEDULES // SHARDS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_schedule_of_faults_breaks_an_invariant(shard: int) -> None:
    """Nodes, workers, networks and etcd fail in every way that the simulation knows: each fault happens, rounds are
    formed and steps are made in between, and when the faults are over training goes on or the run is closed. No verdict
    on a round that is followed by another says "stop"."""
    faults: Counter[str] = Counter()
    rounds = steps = judged = 0
    for seed in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
        counts = play(seed)
        faults.update(counts.faults)
        rounds, steps, judged = rounds + counts.rounds, steps + counts.steps, judged + counts.judged
    assert len(faults) == 21, faults
    assert rounds > 2 * PER_SHARD
    assert steps > 10 * PER_SHARD
    assert judged > PER_SHARD


def test_a_seed_repeats_its_schedule() -> None:
    first: list[str] = []
    again: list[str] = []
    for seed in range(20):
        play(seed, first.append)
        play(seed, again.append)
    assert len(first) > 200
    assert first == again
