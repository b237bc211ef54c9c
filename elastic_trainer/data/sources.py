"""What samples come from: map-style data sets, and streams that can go to a position.

*Fails by* DataError for what is neither, or has no length, or is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, Subset, TensorDataset

from elastic_trainer.data.seeds import SEEDED
from elastic_trainer.errors import DataError


@runtime_checkable
class MapDataset(Protocol):
    """A data set that knows its length and gives sample number i, always the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class SeekableStream(Protocol):
    """Samples that come in an order of their own, and can be read from any position on.

    Sample numbers are positions. The order may differ between epochs, but must be the same each time that one epoch is
    read: then a job that is resumed, or whose ranks change, still uses each sample exactly once per epoch. Reading may
    begin anywhere, in several processes at once; a position that is next to the last one read costs no new beginning.
    """

    def __len__(self) -> int:
        """Samples of an epoch."""

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        """The samples of ``epoch`` from number ``position`` to the last one."""


class StreamEndedError(DataError):
    """A stream had fewer samples than its length says."""


def is_stream(dataset: Any) -> bool:
    """Whether ``dataset`` is read in its own order."""
    return isinstance(dataset, SeekableStream)


def checked_length(dataset: Any) -> int:
    """The length of ``dataset``. DataError if it has none, is empty, or can neither be indexed nor sought in."""
    if not is_stream(dataset):
        _check_map_style(dataset)
    try:
        length = len(dataset)
    except TypeError as error:
        raise DataError(f"{type(dataset).__name__} does not know its length", hint="give it __len__") from error
    if length < 1:
        raise DataError(f"the data set {type(dataset).__name__} is empty", hint="check its path or filter")
    return length


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set, and cannot be read from a position on: after a"
            " failure the job could not go on where it was",
            hint="give it __len__() and read_from(epoch, position), which iterates from that sample on (see"
            " SeekableStream); tar files of samples are read by TarShards",
        )
    if not isinstance(dataset, MapDataset):
        raise DataError(
            f"{type(dataset).__name__} is not a map-style data set: it needs __len__ and __getitem__",
            hint="or __len__ and read_from(epoch, position), if it is a stream",
        )


def plain_tensors(dataset: Any) -> bool:
    """Whether ``dataset`` is a TensorDataset whose samples are the rows of its tensors, and nothing else."""
    return isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__


def deterministic(dataset: Any) -> bool:
    """Whether fetching a sample draws no random numbers: plain tensors, what says ``deterministic = True``, subsets.

    Such data sets need no seeding; with ``__getitems__`` a whole micro-batch is read at once.
    """
    if type(dataset) is Subset:
        return deterministic(dataset.dataset)
    return plain_tensors(dataset) or getattr(dataset, "deterministic", False) is True


def generators(dataset: Any) -> tuple[str, ...]:
    """The default generators that a sample draws from, by the name of their module: what ``generators`` of the data set
    names, else all. Each that is not named costs no seeding for each sample.

    Raises DataError when the data set names another.
    """
    if type(dataset) is Subset:
        return generators(dataset.dataset)
    named = getattr(dataset, "generators", None)
    if named is None:
        return tuple(SEEDED)
    if not isinstance(named, (tuple, list, set, frozenset)) or any(each not in [*SEEDED] for each in named):
        raise DataError(
            f"{type(dataset).__name__}.generators is {named!r}: unknown",
            hint=f"name those of {', '.join(map(repr, SEEDED))} that a sample draws from, as a tuple",
        )
    return tuple(named)
