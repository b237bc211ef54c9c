"""Samples from the script's own DataLoader: the session chooses them, and knows which its steps have used.

A DataLoader fetches ahead of use, so what it has fetched says nothing about what was trained on. The position in the
data therefore stays the session's. When the ranks change, what was fetched ahead for the old ones is thrown away, and
the same DataLoader, with the same processes, goes on with this rank's new part.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a DataLoader that would give other samples, DataError when one of its processes dies; what
the data set raises passes through.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler

from elastic_trainer import torch_internals
from elastic_trainer.data.child import forking, settle
from elastic_trainer.data.placing import placed, versions
from elastic_trainer.data.plan import Course, EpochPlan, SampleRequest
from elastic_trainer.data.reader import Drawn
from elastic_trainer.data.sampler import Batch
from elastic_trainer.data.seeds import key, seed_host, undisturbed
from elastic_trainer.data.workers import Upcoming, alike
from elastic_trainer.errors import ConfigError, DataError

_LOADER: int = 7
"""Purpose of random numbers, beside those in ``data.seeds``."""
_DIED = "DataLoader worker"
"""How torch's message about a dead process of a DataLoader begins."""
_BEGUN: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""What :func:`begun` gave, by process; to be :func:`shut` before the process ends."""


class _Begin(Protocol):
    def __call__(self, source: LoaderSource, epochs: int | None, steps: int | None) -> Iterator[Batch]: ...


class SessionSampler(TorchSampler[list[int]]):
    """What ``session.sampler()`` gives: ``DataLoader(dataset, batch_sampler=sampler)``, then :meth:`batches`.

    Each list of sample numbers is one micro-batch of this rank. ``len()`` is the number of steps in an epoch.
    """

    def __init__(self, dataset: Any, plan: EpochPlan, device: torch.device, begin: _Begin) -> None:
        self.dataset, self.plan = dataset, plan
        self._device, self._begin = device, begin
        self._source: LoaderSource | None = None

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[list[int]]:
        if self._source is None or not self._source.starting:
            raise ConfigError(
                "the DataLoader over session.sampler() is looped over itself, and the session would not know which"
                " samples are used",
                hint="loop over sampler.batches(loader, epochs=N)",
            )
        return self._source

    def batches(
        self, loader: DataLoader[Any], *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Batch]:
        """What ``loader`` gives, as ``session.batches``: a batch comes again until a step has committed it.

        Of the present epoch of ``session.epochs``, or of all up to ``epochs``, or up to that many ``steps`` of the run.
        Augmentations draw from the DataLoader's own random numbers, which depend on the ranks. ``set_epoch(epoch)`` of
        the data set is called before each epoch, if it has one; persistent workers hold the data set as it was.
        """
        self._check(loader)
        if self._source is None or self._source.loader is not loader:
            self._source = LoaderSource(loader, self, self.dataset, self.plan.seed, self._device)
        return self._drawn(self._begin(self._source, epochs, steps), self._source, loader)

    @staticmethod
    def _drawn(batches: Iterator[Batch], source: LoaderSource, loader: DataLoader[Any]) -> Iterator[Batch]:
        try:
            yield from batches
        finally:
            source.close()
            del loader  # until here it must live

    def _check(self, loader: DataLoader[Any]) -> None:
        if getattr(loader, "batch_sampler", None) is not self:
            raise ConfigError(
                "the DataLoader does not draw by this sampler, which gives whole batches",
                hint="say DataLoader(dataset, batch_sampler=sampler), without batch_size, shuffle and sampler",
            )
        if loader.dataset is not self.dataset:
            raise ConfigError(
                "the DataLoader reads another data set than session.sampler() was given", hint="give both the same one"
            )
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                "the DataLoader gives batches in any order, and a session could not say which samples they are",
                hint="leave in_order=False out",
            )


class LoaderSource:
    """A source of samples (see :class:`~elastic_trainer.data.sampler.Source`), and the lists that the loader is given.

    ``starting``: the loader is about to ask for them.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: SessionSampler, dataset: Any, seed: int, device: torch.device
    ) -> None:
        self._loader, self._dataset, self._device = weakref.ref(loader), dataset, device
        self._seed = key(_LOADER, seed)
        self._upcoming = Upcoming()
        self._future: Callable[[SampleRequest], Iterator[SampleRequest]] = lambda request: iter([request])
        self._iterator: Iterator[Any] | None = None
        self._epoch: int | None = None
        self._last: tuple[SampleRequest, Any, tuple[int, ...] | None] | None = None
        """The last that was delivered, for a step that is repeated."""
        self.starting = False
        separate(loader)

    # ---- for the loader

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return [int(number) for number in next(self._upcoming).request.ids]

    # ---- for the session

    @property
    def loader(self) -> DataLoader[Any] | None:
        """None when the script has dropped it, whose persistent workers have then ended: nothing here keeps it."""
        return self._loader()

    def follow(self, course: Course) -> None:
        self._future = course.from_request

    def draw(self, request: SampleRequest) -> Drawn:
        last = self._last
        if last is None or not alike(last[0], request) or last[2] is None or versions(last[1]) != last[2]:
            value = self._delivered(request)
            last = self._last = request, value, versions(value)
        return Drawn(placed(last[1], self._device))

    def close(self) -> None:
        """Throw away what was fetched ahead; the loader ends its processes, unless they are persistent."""
        loader = self.loader
        if self._iterator is not None and not (loader is not None and loader.persistent_workers):
            shut(self._iterator)
        self._iterator, self._last, self._upcoming = None, None, Upcoming()

    def _delivered(self, request: SampleRequest) -> Any:
        if request.epoch != self._epoch:
            self.close()
            self._epoch = request.epoch
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(request.epoch)
        upcoming = self._upcoming
        if not any(task.course == upcoming.course and alike(task.request, request) for task in upcoming.sent):
            upcoming.aim(takewhile(lambda each: each.epoch == request.epoch, self._future(request)))
        while True:
            value = self._next(request)
            task = upcoming.sent.popleft()
            if task.course == upcoming.course and alike(task.request, request):
                return value

    def _next(self, request: SampleRequest) -> Any:
        """The next that the loader gives. One that had come to its end begins again."""
        problem = "ended before all samples of the epoch were read"
        for _ in range(2):
            try:
                with undisturbed():
                    seed_host(key(request.epoch, request.position, start=self._seed))
                    if self._iterator is None:
                        self._iterator = self._begin()
                    return next(self._iterator)
            except StopIteration:
                self._iterator = None
            except Exception as error:
                problem = str(error).partition("\n")[0]
                self.close()
                if not (isinstance(error, RuntimeError) and problem.startswith(_DIED)):
                    raise
                break
        raise DataError(f"the DataLoader failed: {problem}")  # out here: recovery looks for a RuntimeError behind it

    def _begin(self) -> Iterator[Any]:
        loader = self.loader
        assert loader is not None, "who draws from it holds it"
        self.starting = True
        try:
            return begun(loader)
        finally:
            self.starting = False


def separate(loader: DataLoader[Any]) -> None:
    """The processes of ``loader`` will hold no connection of the training, and end with this process."""
    if loader.num_workers:
        loader.worker_init_fn = partial(settle, os.getpid(), _forks(loader), loader.worker_init_fn)


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``, of one that was made :func:`separate`."""
    with forking() if _forks(loader) else nullcontext():
        iterator = iter(loader)
    if loader.num_workers:
        _BEGUN[iterator] = os.getpid()
    return iterator


def shut(iterator: Any) -> None:
    """End the processes of what :func:`begun` gave, if it has some."""
    torch_internals.end_processes(iterator)


def _forks(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context
    return loader.num_workers > 0 and (context or multiprocessing).get_start_method() == "fork"


@atexit.register
def _end() -> None:
    """This process ends, and would wait for those of its loaders, which ignore the signal that asks them to end."""
    for iterator, owner in list(_BEGUN.items()):
        if owner == os.getpid():
            shut(iterator)
