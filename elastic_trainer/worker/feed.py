"""What a session trains on next: epochs and batches from the job's position in the data.

The position moves when a step commits, not when a batch is drawn; so a batch comes again until it has been committed.

*Runs in* the worker's main thread.
*Fails by* DataError for a data set that cannot be used, ConfigError for one that is not the resumed one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from elastic_trainer.data.plan import EpochPlan, Ids
from elastic_trainer.data.sampler import Batch, Collate, Fetcher, Sampler
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker import seeds
from elastic_trainer.worker.control import Control
from elastic_trainer.worker.fields import check_fields
from elastic_trainer.worker.state import Position


class Feed:
    """``batch`` is the one at hand; ``fields`` describe how the data is cut and go into every checkpoint."""

    def __init__(self, position: Position, seed: int, device: torch.device, allow_changed: Collection[str]) -> None:
        self._position, self._seed, self._device, self._allow_changed = position, seed, device, allow_changed
        self.batch: Batch | None = None
        self.fields: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] = {}
        self._control = Control()
        self._even = self._in_epochs = False
        self._sampler: Sampler | None = None
        self.change: Callable[[], bool] = lambda: False
        """Called before a batch is drawn: lets the ranks change there; whether they did."""

    def bind(self, control: Control, resumed: Mapping[str, Any], *, even: bool) -> None:
        """Draw for the rank of the present round. ``resumed``: the fields of the checkpoint that it began from."""
        self._control, self._resumed, self._even = control, resumed, even

    def redraw(self) -> None:
        """The ranks changed between a batch and its step: make it this rank's part of what comes next now."""
        batch, sampler, cursor = self.batch, self._sampler, self._position.cursor
        if batch is None or batch.used or sampler is None:
            return
        if sampler.plan.ended(cursor):
            batch.used = True  # by the others
        else:
            batch.become(sampler.draw(cursor, self._control.rank, self._control.world_size))

    @property
    def next_size(self) -> int:
        """How many samples the next step takes, job-wide; 0 where that is not known, and at the end of an epoch."""
        fields = self.fields or self._resumed
        left = int(fields.get("length", 0)) - self._position.cursor.samples
        return max(0, min(int(fields.get("global_batch", 0)), left))

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the position's to ``total - 1``; the position moves on when the body of one ends."""
        try:
            while self._position.cursor.epoch < total:
                self._in_epochs = True
                yield self._position.cursor.epoch
                self._next_epoch()
        finally:
            self._in_epochs = False

    def batches(
        self, dataset: Any, size: int, micro: int | None, *, shuffle: bool, collate: Collate | None, epochs: int | None
    ) -> Iterator[Batch]:
        """See ``Session.batches``. Mistakes are raised here, not at the first batch."""
        if epochs is None and not self._in_epochs:
            raise ConfigError("batches() does not know how many epochs", hint="say epochs=N, or loop over epochs(N)")
        fetch = Fetcher(dataset, self._device, collate, self._before_draw)
        plan = EpochPlan(fetch.length, size, micro, self._seed, shuffle)
        self.fields = check_fields(plan, self._resumed, self.fields, self._allow_changed)
        return self._drawn(Sampler(fetch, plan, even=self._even), epochs)

    def _drawn(self, sampler: Sampler, epochs: int | None) -> Iterator[Batch]:
        position = self._position
        self._sampler = sampler
        while epochs is None or position.cursor.epoch < epochs:
            while not sampler.plan.ended(position.cursor):
                if self.change():
                    continue
                self.batch = sampler.draw(position.cursor, self._control.rank, self._control.world_size)
                yield self.batch
            self.batch = None
            if epochs is None:
                return
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._position.cursor = Cursor(self._position.cursor.epoch + 1, 0)

    def _before_draw(self, ids: Ids) -> None:
        """Random augmentations are those of this step and sample, also when the batch is drawn again."""
        seeds.seed_all(seeds.key(seeds.DRAW, self._seed, self._position.step, int(ids[0])), self._device)
