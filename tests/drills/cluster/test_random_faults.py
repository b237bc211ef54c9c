"""Faults by chance on real processes: kills, joins, drains and outages, often before the last one is dealt with.

``ELASTIC_TRAINER_RANDOM_FAULTS=N`` plays at least N faults, over as many seeds as that takes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_trainer.drills.checks import compared
from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import staged
from tests.drills.cluster.storm import SETTING, Storm

VARIABLE = "ELASTIC_TRAINER_RANDOM_FAULTS"
FAULTS_IN_CI, FAULTS_OF_A_SEED = 10, 25


def _seeds() -> list[tuple[int, int]]:
    """(seed, number of faults) of each storm."""
    asked = int(os.environ.get(VARIABLE, "0"))
    if asked <= 0:
        return [(1, FAULTS_IN_CI)]
    return [(seed, FAULTS_OF_A_SEED) for seed in range(2, 2 + -(-asked // FAULTS_OF_A_SEED))]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("etcd_binary")
@pytest.mark.parametrize(("seed", "count"), _seeds())
def test_a_storm_of_faults_costs_no_sample(seed: int, count: int, tmp_path: Path) -> None:
    """Whatever happens in whatever order: every sample of every epoch counts once, the parameters of all ranks are
    bitwise equal, there is one round of each number, round numbers only grow, and no node ends by itself."""
    with staged(SETTING, tmp_path) as stage:
        storm = Storm(stage, seed)
        storm.rage(count)
        assert conclusions(stage) == [], storm.told
        assert storm.done.total() >= count
        assert compared(stage.digests()) > 0
        numbers = [document.number for document in stage.history]
        assert numbers[-1] > numbers[0], "no fault ever ended a round"
