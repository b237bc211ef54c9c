"""What all ranks do together between steps: saves, evaluations, sums and barriers of the script's.

In place each of them is repeated when a round ends in the middle of it, or its result taken from a peer that has
completed it.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for calls in the wrong place; CheckpointError and NonFiniteError on all ranks for a state that
cannot be saved. That the storage refuses it is no error: it may take a later one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from elastic_trainer.checkpoint import Committed
from elastic_trainer.data.sampler import Collate, Fetcher
from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError, NonFiniteError, StorageError
from elastic_trainer.model import Phase
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.control import Purpose
from elastic_trainer.worker.inplace.call_replay import JSON, Codec, bytes_of
from elastic_trainer.worker.inplace.recovery import Recovery
from elastic_trainer.worker.model import ema
from elastic_trainer.worker.steps.boundary import Turn
from elastic_trainer.worker.steps.rank_context import RankContext

Result = TypeVar("Result")


class Collectives:
    """See the module. ``stop()`` leaves, when all ranks have agreed to stop in the middle of an evaluation."""

    def __init__(self, part: RankContext, recovery: Recovery | None, stop: Callable[[], None]) -> None:
        self._part, self._recovery, self._stop = part, recovery, stop

    def repeated(self, attempt: Callable[[], Result], codec: Codec = JSON) -> Result:
        """``attempt()``; in place again after each round that ends in the middle of it."""
        return attempt() if self._recovery is None else self._recovery.repeated(attempt, codec)

    # ---- saving

    def save(self, metrics: Mapping[str, float] | None, *, best: bool) -> str | None:
        """Save now; the checkpoint's name on all ranks. None where nothing is saved, or the storage refuses."""
        position = self._part.position
        best_before = position.best
        with self._part.tracker.during(Phase.CHECKPOINT):
            refused, name = self.repeated(lambda: self._save(metrics, best=best))
        if refused:
            position.best = best_before
        return name or None

    def _save(self, metrics: Mapping[str, float] | None, *, best: bool) -> tuple[bool, str]:
        """Whether the storage refuses, and the checkpoint's name."""
        part = self._part
        if part.trained is None:
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        if part.trained.steps.inside:
            raise ConfigError("session.save() inside a step", hint="call it after the step has ended")
        values = {name: float(value) for name, value in (metrics or {}).items()}
        part.tracker.change(Phase.CHECKPOINT)
        part.control.sum(Purpose.SAVE)
        if best:
            part.position.best = values
        committed, problem = self._saved(values, best=best) if part.is_rank0 else (None, None)
        refused = isinstance(problem, StorageError)
        part.control.agree(None if refused else problem)
        outcome = [refused, committed.name if committed is not None else ""]
        refused, name = json.loads(part.control.broadcast_bytes(json.dumps(outcome).encode(), 0))
        return refused, name

    def _saved(self, values: Mapping[str, float], *, best: bool) -> tuple[Committed | None, ElasticTrainerError | None]:
        part = self._part
        for name, value in values.items():
            part.ledger.write(
                "metric", step=part.position.step, epoch=part.position.cursor.epoch, name=name, value=value
            )
        try:
            return part.saver.save(values, best=best), None
        except (CheckpointError, NonFiniteError) as error:
            return None, error

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
            return self._evaluated(model, Fetcher(dataset, self._part.placement.device, collate), batch_size, method)

        with self._part.tracker.during(Phase.EVALUATION):
            if self._recovery is None:
                return attempt()
            self._recovery.evaluating = True
            try:
                return self.repeated(attempt, codec)
            finally:
                self._recovery.evaluating = False

    def _evaluated(self, model: nn.Module, fetch: Fetcher, batch_size: int, method: Callable[..., Result]) -> Result:
        part = self._part
        part.tracker.change(Phase.EVALUATION)
        part.control.sum(Purpose.EVALUATE)
        module = model
        if part.trained is not None:
            module = part.trained.replica.unwrap(model)
            part.trained.replica.align_buffers(part.control)
            if part.trained.state.average is not None:
                ema.align_buffers(part.trained.state.average, part.trained.replica.module)
        part.boundaries.begin_phase()
        result = method(module, fetch, batch_size, control=part.control, turn=self._turn)
        part.boundaries.begin_phase()
        return result

    def _turn(self) -> None:
        self._part.report("evaluating")
        self._part.tracker.moved()
        if self._part.boundaries.cross() is Turn.STOP:
            self._stop()

    # ---- the script's own

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks, in place."""
        part = self._part
        if not part.formed.formed or part.control.alone:
            return tensor
        inside = part.trained is not None and part.trained.steps.inside
        if self._recovery is None or inside:
            groups.all_reduce(part.control, tensor)  # a step that fails is repeated as a whole
            return tensor
        before = tensor.clone()
        return self.repeated(lambda: self._summed(tensor, before), bytes_of(tensor))

    def _summed(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensor.copy_(value)
        if not self._part.control.alone:
            groups.all_reduce(self._part.control, tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.repeated(lambda: self._part.control.sum(Purpose.BARRIER))
