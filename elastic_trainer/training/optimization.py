"""Optimizers and learning rate schedules from their sections of the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from elastic_trainer.training.config import (
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    MultiStepConfig,
    OptimizerConfig,
    SchedulerConfig,
    SgdConfig,
    StepConfig,
)
from elastic_trainer.training.schedule import RunLength


def build_optimizer(config: OptimizerConfig, parameters: ParamsT) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over ``parameters`` or groups of them, as torch's own take them."""
    arguments = config.model_dump(exclude={"name"})
    match config:
        case SgdConfig():
            return torch.optim.SGD(parameters, **arguments)
        case AdamWConfig():
            return torch.optim.AdamW(parameters, **arguments)


def decay_groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: matrices (kernels, embeddings), which decay as the optimizer says; biases and gains, which do not.

    He et al., 2018, "Bag of Tricks", https://arxiv.org/abs/1812.01187, section 3.1; GPT-2 is trained so too.
    """
    every = list(parameters)
    matrices = [each for each in every if each.dim() > 1]
    return [{"params": matrices}, {"params": [each for each in every if each.dim() <= 1], "weight_decay": 0.0}]


def build_scheduler(
    config: SchedulerConfig, optimizer: torch.optim.Optimizer, length: RunLength
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule that ``config`` names, advanced once per optimizer step; None where the rate never changes."""
    if isinstance(config, ConstantConfig) and not config.warmup_steps:
        return None
    return Schedule(config, optimizer, length)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """The schedule that ``config`` names. What decides its course is in its state, so a resumed job compares it."""

    def __init__(self, config: SchedulerConfig, optimizer: torch.optim.Optimizer, length: RunLength) -> None:
        self.settings: dict[str, Any] = config.model_dump(mode="json")
        if isinstance(config, CosineConfig):
            self.settings["steps"] = length.steps
        elif not isinstance(config, ConstantConfig):
            self.settings["steps_per_epoch"] = length.steps_per_epoch
        super().__init__(optimizer, lambda step: rate_factor(config, step, length))


def lengths(scheduler: object) -> list[str]:
    """The settings of ``scheduler`` that follow from the length of the run, which a resumed job may change."""
    settings = scheduler.settings if isinstance(scheduler, Schedule) else ()
    return [f"scheduler.{name}" for name in ("steps", "steps_per_epoch") if name in settings]


def rate_factor(config: SchedulerConfig, step: int, length: RunLength) -> float:
    """What the learning rate of optimizer step ``step`` (from 0) is multiplied by."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    match config:
        case ConstantConfig():
            return 1.0
        case StepConfig():
            return float(config.gamma ** math.floor(step / (config.every_epochs * length.steps_per_epoch)))
        case MultiStepConfig():
            passed = sum(step >= milestone * length.steps_per_epoch for milestone in config.milestones)
            return float(config.gamma**passed)
        case CosineConfig():
            span = max(1, length.steps - config.warmup_steps)
            progress = min(1.0, (step - config.warmup_steps) / span)
            return config.floor + (1.0 - config.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
