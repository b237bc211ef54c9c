"""Metrics over a whole data set: exact, however unevenly it is divided over the ranks.

*Runs in* every rank, main thread, between two steps. *Fails by* what the task raises, and ConfigError for a metric
that the task does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.data.sources import MapDataset, checked_length
from elastic_trainer.errors import ConfigError
from elastic_trainer.training.loading import did_you_mean
from elastic_trainer.training.precision import Arithmetic
from elastic_trainer.training.task import Exhibits, Task
from elastic_trainer.worker.collectives import evaluating
from elastic_trainer.worker.session import Session

EXHIBITED = 8
"""Test samples of which a task may show something."""


def evaluate(
    session: Session, task: Task, model: torch.nn.Module, dataset: MapDataset, batch_size: int, how: Arithmetic
) -> dict[str, float]:
    """The metrics of ``task`` on ``dataset``, equal on all ranks; each sample counts exactly once.

    Ranks add up sums and counts, never means: a mean of means is wrong as soon as the parts differ in size.
    """

    def measured(module: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        with how.autocast():
            return task.metrics(module, batch)

    means = session.evaluate(model, dataset, batch_size, measured)
    return {**means, **task.implied_metrics(means)}


def measurable(task: Task, model: torch.nn.Module, dataset: MapDataset) -> list[str]:
    """The names of the task's metrics, found by measuring one sample with ``model`` where it is (on the CPU)."""
    first = np.arange(1)
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        measured = task.metrics(model, Batch(Fetcher(dataset, torch.device("cpu")), first, first))
    # One sample may hold nothing to count.
    means = {name: float(total) / (float(count) or 1.0) for name, (total, count) in measured.items()}
    return sorted({**means, **task.implied_metrics(means)})


def exhibited(
    task: Task, model: torch.nn.Module, dataset: MapDataset, device: torch.device, how: Arithmetic
) -> Exhibits:
    """What ``task`` shows of the first samples of ``dataset``."""
    first = np.arange(min(EXHIBITED, checked_length(dataset)))
    with evaluating(model), torch.no_grad(), how.autocast():
        return task.exhibits(model, Batch(Fetcher(dataset, device), first, first))


def check_metric(wanted: str | None, known: Iterable[str]) -> None:
    """Raise ConfigError if the best checkpoint is to be chosen by a metric that the task does not measure."""
    names = sorted(known)
    if wanted is None or wanted in names:
        return
    hint = did_you_mean(wanted, names) or f"the task measures: {', '.join(names)}"
    raise ConfigError(f"checkpoint.metric is '{wanted}', which the task does not measure", hint=hint)
