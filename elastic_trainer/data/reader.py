"""Reads the samples of a request from a data set and collates them, in whatever process it is called.

*Runs in* the worker's main thread, or in a data worker process; one copy for each process.
*Owns* the open iterator of a stream.
*Fails by* what the data set raises, with the sample number as a note; DataError when no sample is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from elastic_trainer.data.bad_samples import Missing
from elastic_trainer.data.placing import pinned
from elastic_trainer.data.plan import SampleRequest
from elastic_trainer.data.seeds import SEEDED, SampleSeeds
from elastic_trainer.data.sources import StreamEndedError, checked_length, deterministic, generators, is_stream
from elastic_trainer.errors import DataError

Collate = Callable[[list[Any]], Any]


@dataclass(slots=True)
class Drawn:
    """Collated samples, and those that were left out of them."""

    data: Any
    missing: tuple[Missing, ...] = ()

    def pin_memory(self) -> Drawn:
        """The same in pinned memory; called by the thread of torch's DataLoader that does this."""
        return Drawn(pinned(self.data), self.missing)


class Cancelled(Exception):
    """Reading was given up."""


class SampleReader:
    """``seed`` None: random numbers are left as they are (evaluation). ``skips``: samples that raise are left out.

    ``draws`` names the generators of the process that reading seeds.
    """

    def __init__(self, dataset: Any, collate: Collate | None, seed: int | None = None, *, skips: bool = False) -> None:
        self.length = checked_length(dataset)
        self._dataset, self._own_collate, self._skips = dataset, collate, skips
        drawn = generators(dataset)
        self._seeds = SampleSeeds(seed, drawn) if seed is not None else None
        self._fixed = deterministic(dataset)
        self.draws: tuple[str, ...] = ()
        if self._seeds is not None and not (self._fixed and collate is None):
            self.draws = drawn if collate is None else tuple(SEEDED)
        may_ask_many = self._fixed or self._seeds is None
        self._many = getattr(dataset, "__getitems__", None) if may_ask_many else None
        self._stream = SampleStream(dataset) if is_stream(dataset) else None
        self._epoch: int | None = None

    def read(self, request: SampleRequest, wanted: Callable[[], bool] = lambda: True) -> Drawn:
        """The samples of ``request``. Raises Cancelled between two of them when they are not ``wanted`` any more."""
        self._enter(request.epoch)
        numbers = [int(number) for number in request.ids]
        missing: list[Missing] = []
        samples = self._together(numbers) if self._many is not None else None
        if samples is None:
            samples = self._one_by_one(request.epoch, numbers, missing, wanted)
        if not samples:
            raise DataError(
                f"no sample of a micro-batch is left, all {len(numbers)} raised: {shown(numbers)};"
                f" sample {missing[0].number}: {missing[0].error}",
                hint="repair the data; with larger micro-batches single bad samples can be left out",
            )
        return Drawn(self._collated(request.epoch, numbers, samples), tuple(missing))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch and self._seeds is not None and hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        self._epoch = epoch

    def _together(self, numbers: list[int]) -> list[Any] | None:
        """All at once; None if one of them is bad, and which one has to be found out."""
        try:
            return list(self._many(numbers))  # type: ignore[misc]
        except Exception as error:
            if self._skips:
                return None
            error.add_note(f"raised by the data set for one of the samples {shown(numbers)}")
            raise

    def _one_by_one(
        self, epoch: int, numbers: list[int], missing: list[Missing], wanted: Callable[[], bool]
    ) -> list[Any]:
        samples = []
        for number in numbers:
            if not wanted():
                raise Cancelled
            try:
                samples.append(self._one(epoch, number))
            except Exception as error:
                if not self._skips or isinstance(error, (StreamEndedError, MemoryError)):
                    error.add_note(f"raised by the data set for sample {number}, in epoch {epoch}")
                    raise
                missing.append(Missing(number, f"{type(error).__name__}: {error}"[:300]))
        return samples

    def _one(self, epoch: int, number: int) -> Any:
        if self._seeds is not None and not self._fixed:
            self._seeds.sample(epoch, number)
        return self._dataset[number] if self._stream is None else self._stream.read(epoch, number)

    def _collated(self, epoch: int, numbers: list[int], samples: list[Any]) -> Any:
        if self._own_collate is not None and self._seeds is not None:
            self._seeds.collate(epoch, numbers[0])
        try:
            return (self._own_collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"raised while the samples {shown(numbers)} were collated")
            raise


class SampleStream:
    """Reads single samples of a seekable stream; the next one comes from the iterator that is open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._next: tuple[int, int] | None = None
        self._samples: Iterator[Any] = iter(())

    def read(self, epoch: int, position: int) -> Any:
        """Sample ``position`` of ``epoch``. What the stream raises closes the iterator."""
        if self._next != (epoch, position):
            self._samples = iter(self._stream.read_from(epoch, position))
        self._next = None
        try:
            sample = next(self._samples)
        except StopIteration:
            raise StreamEndedError(
                f"{type(self._stream).__name__} of {len(self._stream)} samples ended before sample {position} of"
                f" epoch {epoch}",
                hint="__len__ must be the number of samples that read_from(epoch, 0) gives",
            ) from None
        self._next = epoch, position + 1
        return sample


def shown(numbers: list[int]) -> str:
    """Sample numbers, the first few of many."""
    return f"{numbers[:8]}{'...' * (len(numbers) > 8)}"
