"""The mnist task at a walking pace, so that a job is still there when a test has done to it what it wants to do."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from elastic_trainer.clock import pause
from elastic_trainer.data.sampler import Batch
from elastic_trainer.jobs.mnist import Mnist

NAME = f"{__name__}:PacedMnist"
HURRY = Path("/checkpoints/hurry")
"""From when this file exists no step waits any more."""
STEP_S = 1.2
"""Slow enough that a slow machine has started all pods of a test before its epochs are over."""


class PacedMnist(Mnist):
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not HURRY.exists():
            pause(STEP_S)
        return super().loss(model, batch)
