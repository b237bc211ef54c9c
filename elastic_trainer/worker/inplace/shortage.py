"""Handles out-of-memory errors: the rank leaves the round, and all ranks agree on what to do with the batch.

The ranks agree in the next round: from then on micro-batches have half the size, or this batch is skipped by a step
without an update. A skipped step counts as committed, so that a rank that missed the decision is healed as after any
step.

*Runs in* the worker's main thread.
*Fails by* the original error if micro-batches of one sample are too large; ConfigError for halving with the fixed tree.
"""

from __future__ import annotations

import gc
import traceback

import torch

from elastic_trainer.errors import ConfigError, StepGivenUpError
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.comm.failures import chain
from elastic_trainer.worker.steps.engine import Step
from elastic_trainer.worker.steps.options import OnShortage
from elastic_trainer.worker.steps.training import Training


class MemoryShortage:
    """See the module."""

    def __init__(self, training: Training) -> None:
        self._training, self._place = training, training.place
        self._policy = OnShortage(self._place.options.checks.out_of_memory)
        if self._policy is OnShortage.HALVE and training.replica.tree is not None:
            raise ConfigError(
                "out_of_memory='halve' cannot go with reduction='tree', whose bits depend on the micro-batches",
                hint="use out_of_memory='skip', or a smaller micro_batch_size",
            )
        self._step = 0
        """The step for which this rank had too little memory; 0: none."""

    def seen(self, step: Step, error: BaseException) -> BaseException:
        """``error`` itself, or StepGivenUpError for an out-of-memory error that can be handled."""
        if self._policy is OnShortage.RAISE or step.committed or step.batch is None:
            return error
        if not any(isinstance(each, torch.OutOfMemoryError) for each in chain(error)):
            return error
        if self._policy is OnShortage.HALVE and max(map(len, step.batch.micro_batches)) <= 1:
            return error
        self._step = step.number
        for each in chain(error):
            traceback.clear_frames(each.__traceback__)
        logger().warning("memory.exhausted", step=step.number, rank=step.rank, then=str(self._policy))
        return StepGivenUpError(f"rank {step.rank} ran out of memory in step {step.number}")

    def agree(self, control: Control) -> None:
        """In a new round, when all ranks hold one state: act if a rank had too little memory for the next step."""
        if self._policy is OnShortage.RAISE:
            return
        position, feed = self._place.position, self._place.feed
        rows = control.gather([self._step, feed.next_size, feed.halvings])
        short = [size for step, size, _ in rows if step == position.step + 1]
        self._step = 0
        feed.halvings = max(halvings for _, _, halvings in rows)
        if not short:
            return
        gc.collect()
        if self._place.placement.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._policy is OnShortage.HALVE:
            feed.halvings += 1
            logger().warning("batch.repeated", step=position.step + 1, halvings=feed.halvings)
        else:
            cursor = Cursor(position.cursor.epoch, position.cursor.samples + short[0])
            self._training.steps.pass_over(cursor)
            logger().warning("batch.skipped", step=position.step, samples=short[0])
