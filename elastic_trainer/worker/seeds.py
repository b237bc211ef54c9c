"""Random numbers of a micro-batch, keyed by (seed, epoch, place of its first sample in the epoch).

A resumed step draws what the lost one drew, whatever the number of ranks is by then, and no rank's generator state
needs saving. Steps about data of the script's own are keyed by (seed, step, rank).
"""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import torch

_MASK: Final = (1 << 64) - 1
START, STEP, DRAW, SAMPLE = 1, 2, 3, 4
"""What the numbers are for; each purpose has a stream of its own."""


def key(*parts: int, start: int = 0) -> int:
    """64 well-mixed bits that depend on all ``parts`` and their order (the SplitMix64 finalizer, chained).

    ``start`` is the key of parts that come before them.
    """
    state = start
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_all(value: int, device: torch.device) -> None:
    """Seed python's, numpy's and torch's generators of this process and ``device`` (about 8 us on a CPU).

    ``torch.manual_seed`` does more and costs 120 us.
    """
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
    elif device.type == "mps":
        torch.mps.manual_seed(value & 0x7FFFFFFF)
