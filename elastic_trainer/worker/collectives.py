"""What all ranks do together between steps, beside saves: evaluations, and the script's own sums and barriers.

In place a call is repeated when a round ends in the middle of it, or its result is taken from a peer that completed it.
Metrics and predictions are over a whole data set, each sample exactly once at any number of ranks.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for calls in the wrong place and for invalid results of the script's functions, whose own errors
pass through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from elastic_trainer.data.plan import cut
from elastic_trainer.data.sampler import Batch, Collate, Fetcher
from elastic_trainer.data.sources import Streams
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Phase
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.control import (
    JSON,
    TENSOR,
    Codec,
    Control,
    Purpose,
    bytes_of,
    packed_tensor,
    unpacked_tensor,
)
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.state.restore import packed, unpacked
from elastic_trainer.worker.steps.engine import BoundaryAction, WorkerContext
from elastic_trainer.worker.steps.training import Training

Number = float | int | torch.Tensor
Predict = Callable[[nn.Module, Batch], torch.Tensor]
Measure = Callable[[nn.Module, Batch], Mapping[str, tuple[Number, Number]]]
Result = TypeVar("Result")
_TREE = Codec(packed, unpacked)


class Collectives:
    """Makes these calls. ``training`` None: the script has no model yet."""

    def __init__(self, context: WorkerContext, training: Training | None) -> None:
        self._context, self._training = context, training

    def repeated(self, attempt: Callable[[], Result], codec: Codec = JSON) -> Result:
        return attempt() if self._training is None else self._training.repeated(attempt, codec)

    # ---- evaluating

    def evaluated(
        self,
        model: nn.Module,
        dataset: Any,
        batch_size: int,
        collate: Collate | None,
        method: Callable[..., Result],
        codec: Codec,
    ) -> Result:
        """``method(module, fetch, batch_size, control=..., turn=...)`` over ``dataset``, on the bare module."""

        def attempt() -> Result:
            return self._evaluated(model, Fetcher(dataset, self._context.placement.device, collate), batch_size, method)

        lasting: AbstractContextManager[None] = nullcontext()
        if self._training is not None:
            self._training.refuse_inside("evaluate() or predict()")
            lasting = self._training.recovery.evaluating()
        with self._context.tracker.during(Phase.EVALUATION), lasting:
            return self.repeated(attempt, codec)

    def _evaluated(self, model: nn.Module, fetch: Fetcher, batch_size: int, method: Callable[..., Result]) -> Result:
        present = self._context.present
        self._context.tracker.change(Phase.EVALUATION)
        present.control.sum(Purpose.EVALUATE)
        module, part = model, DataPart(present.control.rank, present.control.world_size)
        if self._training is not None:
            replica, average = self._training.replica, self._training.state.average
            module = replica.unwrap(model)
            replica.align_buffers(present.control, None if average is None else average.module)
            part = replica.part(present.control)
        present.boundaries.begin_phase()
        result = method(module, fetch, batch_size, control=present.control, turn=self._turn, part=part)
        present.boundaries.begin_phase()
        return result

    def _turn(self) -> None:
        self._context.report()
        self._context.tracker.moved()
        boundaries = self._context.present.boundaries
        if boundaries.cross() is BoundaryAction.STOP:
            boundaries.stop()

    # ---- the script's own

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        present, training = self._context.present, self._training
        if not present.group.formed or present.control.alone:
            return tensor
        if training is None or training.steps.inside or not training.recovery.led:
            groups.all_reduce(present.control, tensor)  # a step that fails is repeated as a whole
            return tensor
        before = tensor.clone()
        return self.repeated(lambda: self._summed(tensor, before), bytes_of(tensor))

    def _summed(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensor.copy_(value)
        control = self._context.present.control
        if not control.alone:
            groups.all_reduce(control, tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Row r is rank r's."""
        mine = packed_tensor(tensor.detach().cpu().contiguous())
        rows = self._shared(lambda control: torch.stack([unpacked_tensor(each) for each in control.gather_bytes(mine)]))
        return rows.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        mine = packed_tensor(tensor.detach().cpu().contiguous())
        value = self._shared(lambda control: unpacked_tensor(control.broadcast_bytes(mine, source)))
        with torch.no_grad():
            return tensor.copy_(value)

    def _shared(self, ask: Callable[[Control], Result], codec: Codec = TENSOR) -> Result:
        """A step that fails is repeated as a whole, so inside one this is made once."""
        training = self._training
        if training is None or training.steps.inside:
            return ask(self._context.present.control)
        return self.repeated(lambda: ask(self._context.present.control), codec)

    def exchange(self, streams: Streams) -> None:
        """All ranks know the states of all ``streams`` behind the last step."""
        position = self._context.position

        def attempt() -> dict[str, Any]:
            control = self._context.present.control
            with control.agreed():
                mine = packed(streams.mine(position.cursor.samples))
            return {"ranks": [unpacked(each) for each in control.gather_bytes(mine)]}

        streams.exchanged(position.step, self.repeated(attempt, _TREE)["ranks"])

    def barrier(self) -> None:
        self._shared(lambda control: control.sum(Purpose.BARRIER), JSON)


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
    everything = [row for data in control.gather_bytes(json.dumps(rows).encode()) for row in json.loads(data)]
    totals: dict[str, list[float]] = {}
    for row in everything:
        for name, (total, count) in row.items():
            so_far = totals.setdefault(name, [0.0, 0.0])
            so_far[0] += total
            so_far[1] += count
    return {name: total / count if count else float("nan") for name, (total, count) in sorted(totals.items())}


def _joined(parts: Sequence[torch.Tensor], control: Control) -> torch.Tensor:
    """All ranks' rows, by rank; a rank may have none."""
    packed = packed_tensor(torch.cat(list(parts)).contiguous()) if parts else b""
    tensors = [unpacked_tensor(data) for data in control.gather_bytes(packed) if data]
    kinds = {(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"ranks predict rows of different kinds: {sorted(map(str, kinds))}", hint="make them alike")
    return torch.cat(tensors)
