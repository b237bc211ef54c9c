"""Keys of random streams."""

from __future__ import annotations

import random

import numpy as np
import torch

from elastic_trainer.data import seeds


def test_keys_differ_in_every_part_and_in_order() -> None:
    """Neighbouring seeds, steps and ranks share no key: a hundred thousand of them are all different."""
    keys = {seeds.key(seeds.STEP, seed, step, rank) for seed in range(10) for step in range(1000) for rank in range(10)}
    assert len(keys) == 100_000
    assert seeds.key(1, 2) != seeds.key(2, 1)
    bits = np.array([[seeds.key(7, step) >> bit & 1 for bit in range(64)] for step in range(2000)])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 5 sigma: each bit is set half the time


def test_all_generators_are_seeded() -> None:
    drawn = []
    for _ in range(2):
        seeds.seeder(torch.device("cpu"))(seeds.key(3))
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
