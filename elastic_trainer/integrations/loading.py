"""What a framework iterates over in place of its DataLoader: the session's batches, cut as one process would see them.

The global batch is the loader's batch, times the micro-batches that the framework accumulates. Each rank computes its
part of it in as many passes, so that the framework's counters are right at any number of ranks.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a loader that a session cannot stand in for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker import alone
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.engine import ManualStep, Step

_LIGHTNING_SEEDS = "pl_worker_init_function"
"""What Lightning gives each DataLoader after seed_everything(workers=True); the session seeds them for each sample."""


def require_hidden(framework: str) -> None:
    """ConfigError unless the ranks are hidden already, as the framework has looked by now."""
    if not alone.hidden():
        raise ConfigError(
            f"{framework} has seen the ranks of this job",
            hint="call session.hide_ranks() right after opening the session",
        )


def batch_sampler(loader: DataLoader[Any]) -> BatchSampler:
    """How ``loader`` cuts its batches; ConfigError that names what else it was told and a session cannot do for it."""
    batches: Any = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or batches is None:
        raise ConfigError(
            "a session draws samples by their numbers: it needs a map-style data set and a batch_size",
            hint="use session.batches() with a SeekableStream for what comes as a stream",
        )
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) not in (RandomSampler, SequentialSampler):
        raise ConfigError(
            f"the DataLoader has a {type(sampler).__name__}, and a session deals out samples itself",
            hint="say shuffle=True or shuffle=False instead of a sampler",
        )
    init: Any = loader.worker_init_fn
    seeds = getattr(getattr(init, "func", init), "__name__", "") == _LIGHTNING_SEEDS
    workers = "the session's own processes read the samples; do it in the data set, at the first sample of a process"
    order = "the session's seed orders the samples: say Session(seed=...)"
    for name, told, hint in (
        ("a sampler with replacement", getattr(sampler, "replacement", False), "leave it out: an epoch is all samples"),
        ("a sampler with num_samples", getattr(sampler, "_num_samples", None), "give a Subset of the data set"),
        ("a sampler with a generator", getattr(sampler, "generator", None), order),
        ("a generator", loader.generator, order),
        ("a worker_init_fn", init is not None and not seeds, workers),
        ("a timeout", loader.timeout, "leave it out: the node agent's watchdog ends a worker that hangs"),
    ):
        if told:
            raise ConfigError(f"the DataLoader has {name}, which a session does not use", hint=hint)
    return batches  # type: ignore[no-any-return]


class SessionLoader:
    """Gives each whole step once, as its first micro-batch; the step takes the others itself (see train).

    ``begun(steps)`` is called before the first batch of an epoch, with the steps of it that are made already, and says
    whether to go on; ``epoch()`` says which one it is, for a framework that does not begin with 0 in each process.
    """

    def __init__(
        self,
        session: Session,
        loader: DataLoader[Any],
        passes: int = 1,
        begun: Callable[[int], bool] = lambda steps: True,
        epoch: Callable[[], int] | None = None,
    ) -> None:
        dataset: Any = loader.dataset
        self._cut = batch_sampler(loader)
        self.session, self.dataset, self.batch_size = session, dataset, self._cut.batch_size
        self.passes, self._loader, self._begun, self._epoch, self._epochs = passes, loader, begun, epoch, 0
        self.sampler, self.batch_sampler, self.num_workers = None, None, loader.num_workers
        self.reached = False
        """Whether the program has come to the epoch that the session is in."""
        self.global_batch = self.batch_size * passes

    def __len__(self) -> int:
        return -(-self._samples // self.global_batch)

    @property
    def _samples(self) -> int:
        """How many an epoch has: whole batches of the DataLoader, if it drops the last one."""
        length = len(self.dataset)
        return length - length % self.batch_size if self._cut.drop_last else length

    def made(self, cursor: Cursor) -> int:
        """How many steps of the epoch of ``cursor`` are behind it."""
        return -(-min(cursor.samples, self._samples) // self.global_batch)

    def at_end(self, cursor: Cursor) -> bool:
        """Whether nothing is left to train on in the epoch of ``cursor``."""
        return cursor.samples >= self._samples

    def __iter__(self) -> Iterator[Any]:
        """The next epoch of the program: what is left of it, nothing if it is trained already.

        In the body of session.epochs() it is the epoch of that. Nothing is looked at before the first batch is asked
        for: a framework may make the iterator before the session has resumed.
        """
        cursor = self.session.cursor
        if self.session.within_epochs:
            self._epochs = cursor.epoch + 1
        else:
            self._epochs = 1 + (self._epochs if self._epoch is None else self._epoch())
        self.reached = cursor.epoch < self._epochs
        if self._begun(self.made(cursor) if cursor.epoch == self._epochs - 1 else 0):
            yield from self._given(self._batches())

    def _batches(self) -> Iterator[Batch]:
        context: Any = self._loader.multiprocessing_context
        return self.session.batches(
            self.dataset,
            global_batch_size=self.global_batch,
            passes=self.passes,
            shuffle=isinstance(self._cut.sampler, RandomSampler),
            collate=self._loader.collate_fn,
            epochs=None if self.session.within_epochs else self._epochs,
            workers=self._loader.num_workers,
            prefetch=self._loader.prefetch_factor or 2,
            multiprocessing_context=context.get_start_method() if context is not None else None,
            drop_last=self._cut.drop_last,
        )

    def _given(self, batches: Iterator[Batch]) -> Iterator[Any]:
        for batch in batches:
            yield batch.micro_batches[0].data

    def set_epoch(self, epoch: int) -> None:
        """The program is in this epoch."""
        self._epochs = epoch


class PassLoader(SessionLoader):
    """Gives each pass of a step, and begins the step with the first; the framework's loop calls :meth:`update`.

    ``counting(last)`` is called before each pass. A step whose round ends gives as many passes, and comes again.
    """

    def __init__(
        self,
        session: Session,
        loader: DataLoader[Any],
        passes: int = 1,
        counting: Callable[[bool], object] = lambda last: None,
    ) -> None:
        super().__init__(session, loader, passes)
        self._counting = counting
        self._step: ManualStep | None = None
        self.last = False
        """Whether this pass is the last one of its step."""

    def __len__(self) -> int:
        return -(-self._samples // self.batch_size)

    @property
    def step(self) -> ManualStep:
        """The present one."""
        if self._step is None:
            raise ConfigError("there is no batch to train on", hint="loop over the DataLoader that was prepared")
        return self._step

    def update(self) -> bool:
        """Make the update, if this pass is the last one; whether the step counts."""
        if not self.last:
            return False
        self.step.update()
        return self.step.end()

    def _given(self, batches: Iterator[Batch]) -> Iterator[Any]:
        for batch in batches:
            step = self._step = self.session.begin_step()
            left, data = len(batch.micro_batches), None
            try:
                for part in step.micro_batches():
                    left -= 1
                    self.last = left == 0
                    self._counting(self.last)
                    data = part.data if not step.lost else data
                    yield data
            except GeneratorExit:
                step.abandon()
                raise
            if not step.ended:
                raise ConfigError("a batch was trained on without optimizer.step()", hint="call it for each batch")


def train(session: Session, compute: Callable[[Step, Batch, bool], None], update: Callable[[Step], None]) -> Step:
    """Repeat the step about the present batch until it commits: a round may end in the middle of it.

    ``compute(step, part, first)`` makes one pass on ``part.data``; ``first``: on what the loader gave. ``update(step)``
    makes the update.
    """
    first = True
    while True:
        with session.step() as step:
            for part in step.micro_batches():
                compute(step, part, first and not part.outdated)
                first = False
            update(step)
        if step.committed or step.batch is None or step.batch.used:
            return step


class Still(torch.optim.Optimizer):
    """Stands in for ``optimizer`` in a framework; the session makes the update."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: Callable[[], object] = lambda: None) -> None:
        self.optimizer, self._update = optimizer, update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are dropped when a step begins."""

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: Any) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class Advanced:
    """What a framework steps in place of a ``scheduler`` that the session advances."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Each step of the session advances it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
