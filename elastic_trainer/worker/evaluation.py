"""Metrics over a whole data set, each sample counted exactly once whatever the number of ranks.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for what ``fn`` may not return; what ``fn`` raises passes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_trainer.data.plan import cut
from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.control import Control

Number = float | int | torch.Tensor
Measure = Callable[[nn.Module, Batch], Mapping[str, tuple[Number, Number]]]


def evaluate(
    module: nn.Module,
    fetch: Fetcher,
    batch_size: int,
    measure: Measure,
    control: Control,
    turn: Callable[[], None],
) -> dict[str, float]:
    """``{name: sum / count}`` over all samples of ``fetch``; nan where nothing was counted.

    ``measure(module, batch)`` gives ``{name: (sum, count)}`` of one batch. ``turn`` is called equally often on all
    ranks, also on those with fewer samples.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}", hint="it must be at least 1")
    begin, end = cut(fetch.length, control.world_size, control.rank)
    longest = -(-fetch.length // control.world_size)
    totals: dict[str, list[Any]] = {}
    with evaluating(module), torch.no_grad():
        for offset in range(0, longest, batch_size):
            start, stop = begin + offset, min(begin + offset + batch_size, end)
            if start < stop:
                ids = np.arange(start, stop)
                _add(totals, measure(module, Batch(fetch, ids, ids)))
            turn()
    return reduced(totals, control)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, then for each submodule the mode that it had."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


def _add(totals: dict[str, list[Any]], measured: Mapping[str, tuple[Number, Number]]) -> None:
    for name, pair in measured.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"the metric {name!r} is not a (sum, count) pair", hint="return {name: (sum, count)}")
        total = totals.setdefault(name, [0.0, 0.0])
        total[0] += _wide(pair[0])
        total[1] += _wide(pair[1])


def _wide(value: Number) -> Any:
    """In double precision, without waiting for a device that has it."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.detach()
    return value.double() if value.device.type != "mps" else value.cpu().double()


def reduced(totals: Mapping[str, list[Any]], control: Control) -> dict[str, float]:
    """Sums and counts of all ranks together; a rank may lack names, say because it had no samples."""
    names = sorted(
        {name for row in control.gather_bytes(json.dumps(list(totals)).encode()) for name in json.loads(row)}
    )
    vector = torch.tensor([float(x) for name in names for x in totals.get(name, (0.0, 0.0))], dtype=torch.float64)
    if names:
        control.add_up(vector)
    values = vector.tolist()
    pairs = zip(names, values[0::2], values[1::2], strict=True)
    return {name: total / count if count else float("nan") for name, total, count in pairs}
