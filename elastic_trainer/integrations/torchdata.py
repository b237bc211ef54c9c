"""torchdata's StatefulDataLoader as streams of a session: it prefetches, and tracks its consumer's position.

Over map-style data it is a DataLoader as others, with ``session.sampler()``. Over an IterableDataset it has a state, so
that the job can go on where it was: :func:`streams` gives each stream of the job one of its own.

*Runs in* the worker's main thread. *Owns* the processes of the loaders that are open.
*Fails by* ConfigError for data that is not a stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports what torch is about to drop
    from torchdata.stateful_dataloader import StatefulDataLoader as StatefulDataLoader

from elastic_trainer import torch_internals
from elastic_trainer.data.sampler import begun, separate
from elastic_trainer.data.sources import Streams
from elastic_trainer.errors import ConfigError


def streams(
    dataset: Callable[[int, int], Any],
    shards: int,
    *,
    num_workers: int = 1,
    prefetch_factor: int = 16,
    state_every: int = 100,
    name: str = "streams",
    **options: Any,
) -> Streams:
    """``shards`` streams for ``session.batches(..., shuffle=False, steps=N)``, each read ahead by its own processes.

    ``dataset(shard, shards)`` gives the IterableDataset of one: of Hugging Face
    ``split_dataset_by_node(data, rank=shard, world_size=shards)``. One with ``state_dict()`` and ``load_state_dict()``
    is resumed by them, another by reading what was read before. ``num_workers`` is for each stream that a rank reads;
    ``options`` are StatefulDataLoader's.
    """
    if num_workers > 0:
        options = {"prefetch_factor": prefetch_factor, **options}
    if "batch_size" in options or "batch_sampler" in options:
        raise ConfigError(
            "a stream gives single samples, which the session puts together", hint="say global_batch_size to batches()"
        )

    def make(shard: int, shards: int) -> _Ahead:
        return _Ahead(dataset(shard, shards), num_workers, options)

    return Streams(make, shards, state_every=state_every, name=name)


class _Ahead:
    """One stream: a StatefulDataLoader of single samples."""

    def __init__(self, dataset: Any, num_workers: int, options: dict[str, Any]) -> None:
        if not isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"the data of a stream is a {type(dataset).__name__}, which is not an IterableDataset",
                hint="give map-style data to session.batches() or session.sampler()",
            )
        self._dataset, self._iterator = dataset, iter(())
        with _quiet():
            self._loader: Any = StatefulDataLoader(
                dataset, batch_size=None, num_workers=num_workers, generator=torch.Generator(), **options
            )
        separate(self._loader)

    def __iter__(self) -> Iterator[Any]:
        with _quiet():
            self._iterator = begun(self._loader)
        return self._iterator

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def close(self) -> None:
        torch_internals.end_processes(self._iterator)


@contextmanager
def _quiet() -> Iterator[None]:
    """torchdata 0.11 calls what torch 2.13 is about to drop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        yield
