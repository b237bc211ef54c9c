"""Random numbers of a micro-batch, keyed by (seed, epoch, place of its first sample in the epoch).

A resumed step draws what the lost one drew, whatever the number of ranks is by then, and no rank's generator state
needs saving. Steps about data of the script's own are keyed by (seed, step, rank).
"""

from __future__ import annotations

import torch

from elastic_trainer.data.seeds import key, seed_host

__all__ = ["SAMPLE", "START", "STEP", "key", "seed_all"]

START, STEP, SAMPLE = 1, 2, 4
"""What the numbers are for; each purpose has a stream of its own (``data.seeds`` has two more)."""


def seed_all(value: int, device: torch.device) -> None:
    """Seed python's, numpy's and torch's generators of this process and ``device`` (about 8 us on a CPU).

    ``torch.manual_seed`` does more and costs 120 us.
    """
    seed_host(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value & 0x7FFFFFFF)
