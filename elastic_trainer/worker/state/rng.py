"""Random numbers of a micro-batch, keyed by (seed, epoch, position of its first sample in the epoch).

A resumed step draws what the lost one drew, at any number of ranks, and no rank's generator state needs saving. Steps
without a batch of the session's are keyed by (seed, step, rank).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_trainer.data.seeds import key, seed_host

__all__ = ["SAMPLE", "START", "STEP", "key", "seeder"]

START, STEP, SAMPLE = 1, 2, 4
"""Each purpose has a stream of its own (``data.seeds`` has two more)."""


def seeder(device: torch.device) -> Callable[[int], None]:
    """What seeds python's, numpy's and torch's generators of this process and ``device``."""
    on_device = _ON_DEVICE.get(device.type)
    if on_device is None:
        return seed_host

    def seed(value: int) -> None:
        seed_host(value)
        on_device(value)

    return seed


_ON_DEVICE: dict[str, Callable[[int], None]] = {
    "cuda": lambda value: torch.cuda.manual_seed(value),
    "mps": lambda value: torch.mps.manual_seed(value & 0x7FFFFFFF),
}
