"""Metrics and predictions over a whole data set, each sample exactly once at any number of ranks.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for invalid results of the script's functions, whose own errors pass through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from elastic_trainer.data.plan import cut
from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control, packed_tensor, unpacked_tensor
from elastic_trainer.worker.model.replica import DataPart

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
    part: DataPart,
) -> dict[str, float]:
    """``{name: sum / count}`` over all samples of ``fetch``; nan where nothing was counted.

    ``measure(module, batch)`` gives ``{name: (sum, count)}`` of one batch. ``turn`` is called equally often on all
    ranks.
    """
    with evaluating(module), torch.no_grad():
        drawn = _shard(fetch, batch_size, part, turn)
        measured = [found for batch, counts in drawn if (found := _detached(measure(module, batch))) and counts]
    return reduced(measured, control)


def predict(
    module: nn.Module,
    fetch: Fetcher,
    batch_size: int,
    fn: Predict,
    control: Control,
    turn: Callable[[], None],
    part: DataPart,
) -> torch.Tensor:
    """``fn(module, batch)`` of all samples of ``fetch``, on the CPU, in the data set's order, on all ranks.

    ``fn`` gives one row per sample, all of one shape and dtype. Shape: (length, *row).
    """
    parts: list[torch.Tensor] = []
    with evaluating(module), torch.no_grad():
        for batch, counts in _shard(fetch, batch_size, part, turn):
            rows = fn(module, batch)
            if not isinstance(rows, torch.Tensor) or rows.dim() < 1 or len(rows) != len(batch):
                got = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise ConfigError(f"the prediction for {len(batch)} samples is {got}", hint="return one row per sample")
            if counts:
                parts.append(rows.detach().cpu())
    return _joined(parts, control)


def _shard(fetch: Fetcher, batch_size: int, part: DataPart, turn: Callable[[], None]) -> Iterator[tuple[Batch, bool]]:
    """This rank's contiguous part of the batches, and whether each counts.

    ``turn`` is called after each, equally often on all ranks.

    Batch boundaries do not depend on the number of ranks, since results may depend on them.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}", hint="it must be at least 1")
    batches = -(-fetch.length // batch_size)
    begin, end = cut(batches, part.world, part.rank)
    for turns in range(begin, begin + -(-batches // part.world)):
        number, counts = (turns, part.first) if turns < end else (0, False)
        if turns < end or part.always_even:
            ids = np.arange(number * batch_size, min((number + 1) * batch_size, fetch.length))
            yield Batch(fetch, ids, ids), counts
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


def _detached(measured: Mapping[str, tuple[Number, Number]]) -> dict[str, tuple[Number, Number]]:
    """The pairs, without a wait for the device. ConfigError for anything else."""
    for name, pair in measured.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"the metric {name!r} is not a (sum, count) pair", hint="return {name: (sum, count)}")
    return {name: (_wide(total), _wide(count)) for name, (total, count) in measured.items()}


def _wide(value: Number) -> Number:
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = value.detach()
    return value.double() if value.device.type != "mps" else value.cpu().double()


def reduced(measured: Sequence[Mapping[str, tuple[Number, Number]]], control: Control) -> dict[str, float]:
    """Sums and counts of all batches of all ranks, added in their order; a batch may lack names.

    So the result has the same bits at any number of ranks.
    """
    rows = [{name: (float(total), float(count)) for name, (total, count) in each.items()} for each in measured]
    totals: dict[str, tuple[float, float]] = {}
    for row in (row for data in control.gather_bytes(json.dumps(rows).encode()) for row in json.loads(data)):
        for name, (total, count) in row.items():
            sum_so_far, count_so_far = totals.get(name, (0.0, 0.0))
            totals[name] = sum_so_far + total, count_so_far + count
    return {name: total / count if count else float("nan") for name, (total, count) in sorted(totals.items())}


def _joined(parts: Sequence[torch.Tensor], control: Control) -> torch.Tensor:
    """All ranks' rows, by rank; a rank may have none."""
    packed = packed_tensor(torch.cat(list(parts))) if parts else b""
    tensors = [unpacked_tensor(data) for data in control.gather_bytes(packed) if data]
    kinds = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"ranks predict rows of different kinds: {sorted(map(str, kinds))}", hint="make them alike")
    return torch.cat(tensors)
