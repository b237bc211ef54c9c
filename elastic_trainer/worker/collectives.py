"""What all ranks do together between steps: saves, evaluations, and the script's own sums and barriers.

In place a call is repeated when a round ends in the middle of it, or its result is taken from a peer that completed it.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError for calls in the wrong place; CheckpointError and NonFiniteError on all ranks for a state that
cannot be saved. A refusal by the storage is not an error: it may accept a later save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from elastic_trainer.checkpoint import Save
from elastic_trainer.data.sampler import Collate, Fetcher
from elastic_trainer.data.streams import Streams
from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError, NonFiniteError, StorageError
from elastic_trainer.model import Phase
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm.codecs import JSON, TENSOR, Codec, bytes_of, packed_tensor, unpacked_tensor
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.state.saver import Saver
from elastic_trainer.worker.state.transfer import packed, unpacked
from elastic_trainer.worker.steps.engine import Turn, Workplace
from elastic_trainer.worker.steps.training import Training

Result = TypeVar("Result")
_TREE = Codec(packed, unpacked)


class Collectives:
    """See the module. ``training`` None: the script has no model yet."""

    def __init__(self, place: Workplace, training: Training | None) -> None:
        self._place, self._training = place, training

    def repeated(self, attempt: Callable[[], Result], codec: Codec = JSON) -> Result:
        """``attempt()``; in place again after each round that ends in the middle of it.

        ConfigError between two synchronisations of ranks that train apart: those that have made fewer steps would not
        come here after such an end.
        """
        if self._training is None:
            return attempt()
        if self._training.outer is not None:
            self._training.outer.require_closed()
        return self._training.round_end.repeated(attempt, codec)

    def finished(self, attempt: Callable[[], None]) -> None:
        """As :meth:`repeated`, for the last call of all."""
        if self._training is None:
            attempt()
        else:
            self._training.round_end.repeated(attempt, JSON)

    def _refuse_inside(self, call: str) -> None:
        if self._training is not None and self._training.steps.inside:
            raise ConfigError(f"session.{call} inside a step", hint="call it after the step has ended")

    # ---- saving

    def save(self, metrics: Mapping[str, float] | None, *, best: bool, wait: bool) -> str | None:
        """Save now; the checkpoint's name on all ranks. None where nothing is saved, or the storage refuses."""
        position, training = self._place.position, self._training
        if training is None:
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        best_before, before, feed = position.best, training.saver.newest, self._place.feed
        feed.closing = feed.behind_batches
        try:
            with self._place.tracker.during(Phase.CHECKPOINT):
                refused, name = self.repeated(lambda: self._save(training, metrics, before, best=best, wait=wait))
        finally:
            feed.closing = False
        if refused:
            position.best = best_before
        return name or None

    def _save(
        self, training: Training, metrics: Mapping[str, float] | None, before: Save | None, *, best: bool, wait: bool
    ) -> tuple[bool, str]:
        """Whether the storage refused, and the checkpoint's name.

        ``before``: rank 0's newest save before the first attempt. One begun in an earlier attempt is not begun again.
        """
        place, control = self._place, self._place.present.control
        self._refuse_inside("save()")
        values = {name: float(value) for name, value in (metrics or {}).items()}
        place.tracker.change(Phase.CHECKPOINT)
        mine = control.rank == 0
        newest = training.saver.newest
        begun = newest if mine and newest is not before and newest is not None and newest.may_succeed else None
        goes_on, *_ = control.sum(Purpose.SAVE, [float(begun is not None)])
        if best:
            place.position.best = values
        name, problem = self._saved(training.saver, values, begun, best=best, wait=wait) if mine else (None, None)
        if not (mine or goes_on):
            training.saver.help()
        refused = isinstance(problem, StorageError)
        control.agree(None if refused else problem)
        refused, name = json.loads(control.broadcast_bytes(json.dumps([refused, name or ""]).encode(), 0))
        return refused, name

    def _saved(
        self, saver: Saver, values: Mapping[str, float], begun: Save | None, *, best: bool, wait: bool
    ) -> tuple[str | None, ElasticTrainerError | None]:
        position = self._place.position
        for name, value in values.items() if begun is None else ():
            self._place.ledger.write("metric", step=position.step, epoch=position.cursor.epoch, name=name, value=value)
        try:
            # After a failure the caller learns whether this one was durable.
            return saver.save(values, best=best, wait=wait or saver.failed, begun=begun), None
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
            return self._evaluated(model, Fetcher(dataset, self._place.placement.device, collate), batch_size, method)

        self._refuse_inside("evaluate() or predict()")
        lasting = self._training.round_end.evaluating() if self._training is not None else nullcontext()
        with self._place.tracker.during(Phase.EVALUATION), lasting:
            return self.repeated(attempt, codec)

    def _evaluated(self, model: nn.Module, fetch: Fetcher, batch_size: int, method: Callable[..., Result]) -> Result:
        present = self._place.present
        self._place.tracker.change(Phase.EVALUATION)
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
        self._place.report()
        self._place.tracker.moved()
        if self._place.present.boundaries.cross() is Turn.STOP:
            self.stop()

    def stop(self) -> None:
        if self._training is not None:
            self._training.stop()
        self._place.stop()

    # ---- the script's own

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        present, training = self._place.present, self._training
        if not present.group.formed or present.control.alone:
            return tensor
        if training is None or training.steps.inside or not training.round_end.led:
            groups.all_reduce(present.control, tensor)  # a step that fails is repeated as a whole
            return tensor
        before = tensor.clone()
        return self.repeated(lambda: self._summed(tensor, before), bytes_of(tensor))

    def _summed(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensor.copy_(value)
        control = self._place.present.control
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
            return ask(self._place.present.control)
        return self.repeated(lambda: ask(self._place.present.control), codec)

    def exchange(self, streams: Streams) -> None:
        """All ranks know the states of all ``streams`` behind the last step."""
        position = self._place.position

        def attempt() -> dict[str, Any]:
            control = self._place.present.control
            with control.agreed():
                mine = packed(streams.mine(position.cursor.samples))
            return {"ranks": [unpacked(each) for each in control.gather_bytes(mine)]}

        streams.exchanged(position.step, self.repeated(attempt, _TREE)["ranks"])

    def barrier(self) -> None:
        self._shared(lambda control: control.sum(Purpose.BARRIER), JSON)
