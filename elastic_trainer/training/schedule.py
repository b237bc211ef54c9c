"""How long a run is and when an evaluation is due. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic_trainer.model import Cursor
from elastic_trainer.training.config import EvaluationConfig, JobConfig


@dataclass(frozen=True, slots=True)
class RunLength:
    """A run in epochs and optimizer steps. Independent of the number of ranks, since the global batch is.

    ``steps`` is what a whole run takes (schedules and progress go by it). It is no limit: a run that was resumed with
    another global batch takes more or fewer, and still sees all its epochs.
    """

    samples: int
    steps_per_epoch: int
    epochs: int
    steps: int
    max_steps: int | None = None

    def finished(self, cursor: Cursor, step: int) -> bool:
        """Whether a run that committed ``step`` steps and stands at ``cursor`` has nothing left to do."""
        limited = self.max_steps is not None and step >= self.max_steps
        return limited or epochs_done(cursor, self.samples) >= self.epochs


def run_length(config: JobConfig, samples: int) -> RunLength:
    """The length of the job ``config`` on ``samples`` training samples; the last batch of an epoch may be smaller."""
    per_epoch = math.ceil(samples / config.samples_per_step)
    by_epochs = math.inf if config.epochs is None else config.epochs * per_epoch
    by_steps = math.inf if config.max_steps is None else config.max_steps
    steps = int(min(by_epochs, by_steps))
    return RunLength(samples, per_epoch, math.ceil(steps / per_epoch), steps, config.max_steps)


def epochs_done(cursor: Cursor, samples: int) -> int:
    """Whole epochs behind ``cursor`` on a data set of ``samples`` samples."""
    return cursor.epoch + (cursor.samples >= samples)


def evaluation_due(config: EvaluationConfig, length: RunLength, cursor: Cursor, step: int) -> bool:
    """Whether the state after ``step`` steps, at ``cursor``, is to be evaluated.

    A function of the position alone: a run resumed between a step and its evaluation finds it still due.
    """
    if step == 0:
        return False
    if length.finished(cursor, step):
        return True
    at_epoch_end = cursor.samples == 0 or cursor.samples >= length.samples
    by_epoch = at_epoch_end and _every(config.every_epochs, epochs_done(cursor, length.samples))
    return by_epoch or _every(config.every_steps, step)


def _every(interval: int | None, count: int) -> bool:
    return interval is not None and count % interval == 0
