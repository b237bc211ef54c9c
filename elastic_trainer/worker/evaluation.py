"""Metrics and predictions over a whole data set, each sample exactly once whatever the number of ranks.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for what a function may not return; what it raises passes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_trainer.data.plan import cut
from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.calls import packed_tensor, unpacked_tensor
from elastic_trainer.worker.control import Control

Number = float | int | torch.Tensor
Predict = Callable[[nn.Module, Batch], torch.Tensor]
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
    totals: dict[str, list[Any]] = {}
    with evaluating(module), torch.no_grad():
        for batch in _shard(fetch, batch_size, control, turn):
            _add(totals, measure(module, batch))
    return reduced(totals, control)


def predict(
    module: nn.Module, fetch: Fetcher, batch_size: int, fn: Predict, control: Control, turn: Callable[[], None]
) -> torch.Tensor:
    """``fn(module, batch)`` of all samples of ``fetch``, on the CPU, in the order of the data set, on all ranks.

    ``fn`` gives a tensor of one row for each sample; rows are alike in shape and dtype. Shape: (length, *row).
    """
    parts: list[torch.Tensor] = []
    with evaluating(module), torch.no_grad():
        for batch in _shard(fetch, batch_size, control, turn):
            rows = fn(module, batch)
            if not isinstance(rows, torch.Tensor) or rows.dim() < 1 or len(rows) != len(batch):
                told = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise ConfigError(f"the prediction for {len(batch)} samples is {told}", hint="return a row for each")
            parts.append(rows.detach().cpu())
    return _joined(parts, control)


def _joined(parts: Sequence[torch.Tensor], control: Control) -> torch.Tensor:
    """The rows of all ranks, by rank; a rank may have none."""
    packed = packed_tensor(torch.cat(list(parts)).contiguous()) if parts else b""
    tensors = [unpacked_tensor(data) for data in control.gather_bytes(packed) if data]
    kinds = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"ranks predict rows of different kinds: {sorted(map(str, kinds))}", hint="make them alike")
    return torch.cat(tensors)


def _shard(fetch: Fetcher, batch_size: int, control: Control, turn: Callable[[], None]) -> Iterator[Batch]:
    """This rank's contiguous part of the samples, in batches; a ``turn`` behind each, as many as any rank has."""
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}", hint="it must be at least 1")
    begin, end = cut(fetch.length, control.world_size, control.rank)
    longest = -(-fetch.length // control.world_size)
    for offset in range(0, longest, batch_size):
        start, stop = begin + offset, min(begin + offset + batch_size, end)
        if start < stop:
            ids = np.arange(start, stop)
            yield Batch(fetch, ids, ids)
        turn()


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
