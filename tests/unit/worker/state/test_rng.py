"""Keys of random streams."""

from __future__ import annotations

import random

import numpy as np
import torch

from elastic_trainer.worker.state import rng


def test_keys_differ_in_every_part_and_in_order() -> None:
    """Neighbouring seeds, steps and ranks share no key: a hundred thousand of them are all different."""
    keys = {rng.key(rng.STEP, seed, step, rank) for seed in range(10) for step in range(1000) for rank in range(10)}
    assert len(keys) == 100_000
    assert rng.key(1, 2) != rng.key(2, 1)
    bits = np.array([[rng.key(7, step) >> bit & 1 for bit in range(64)] for step in range(2000)])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 5 sigma: each bit is set half the time


def test_all_generators_are_seeded() -> None:
    drawn = []
    for _ in range(2):
        rng.seeder(torch.device("cpu"))(rng.key(3))
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
