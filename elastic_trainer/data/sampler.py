"""Draws one rank's part of a global batch from a data set and puts it on the device.

*Runs in* the worker's main thread.
*Fails by* DataError for a data set that cannot be planned (no length, empty), whose samples do not have the asked part,
or whose bad samples are too many; what the data set itself raises passes through, with the sample number as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from elastic_trainer import torch_internals
from elastic_trainer.data.bad_samples import Tally, limit
from elastic_trainer.data.loading import Loading
from elastic_trainer.data.placing import pinned, placed
from elastic_trainer.data.plan import Course, EpochPlan, GlobalBatch, Ids, Piece, SampleRequest, asked, spanning
from elastic_trainer.data.reader import Collate, Drawn, SampleReader
from elastic_trainer.data.seeds import undisturbed
from elastic_trainer.data.sources import plain_tensors
from elastic_trainer.data.streams import Streams
from elastic_trainer.data.workers import Workers
from elastic_trainer.errors import DataError
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry.logs import logger

__all__ = ["Batch", "Collate", "Fetcher", "Sampler"]

Fetch = Callable[[Ids], Drawn]


class Batch:
    """One rank's part of a global batch, or one micro-batch of it. Its data are fetched on first use.

    ``ids`` are the samples that count (none for a filler); a mean loss over the data is to be multiplied by ``weight``
    (both leave out bad samples once the data were fetched). It is part of global batch ``index`` of ``epoch``, which
    has ``global_size`` samples; ``start`` samples of the epoch come before this part, ``following`` is the cursor after
    the global batch. ``micro_batches`` has at least one element; ``number`` says which of the ``parts`` micro-batches
    of the global batch this is (None: several, or a filler). ``used`` is set once a step has committed it.
    """

    def __init__(
        self,
        fetch: Fetch,
        positions: Ids,
        ids: Ids,
        *,
        weight: float = 1.0,
        whole: GlobalBatch | None = None,
        offset: int = 0,
        number: int | None = None,
        parts: int = 1,
        micro_batches: tuple[Batch, ...] = (),
    ) -> None:
        self._fetch, self._positions = fetch, positions
        self._data: Any = None
        self._fetched = self._read = False
        self.outdated = False
        """Whether the data that the script read last are of the samples before :meth:`become`."""
        self._missing: frozenset[int] = frozenset()
        self._ids, self._planned = ids, weight
        self.weight = weight
        """What a mean loss over the data must be multiplied by.

        Planned is n / N for n of N samples of the global batch, times W ranks. Where only p of the n are there, p / N
        makes the gradient that of the sum over all samples present, divided by N.
        """
        self.epoch, self.index = (whole.cursor.epoch, whole.index) if whole is not None else (0, 0)
        self.global_size = len(whole.ids) if whole is not None else len(ids)
        self.start = offset + (whole.cursor.samples if whole is not None else 0)
        self.following = whole.following if whole is not None else None
        self.number, self.parts = number, parts
        self.micro_batches = micro_batches or (self,)
        self.used = False

    @property
    def data(self) -> Any:
        if not self._fetched:
            drawn = self._fetch(self._positions)
            self._missing = frozenset(each.number for each in drawn.missing)
            if self._missing:
                self.weight = self._planned * (1.0 - len(self._missing) / len(self._positions))
            self._data, self._fetched, self._read, self.outdated = drawn.data, True, True, False
        return self._data

    @property
    def ids(self) -> Ids:
        """The samples that count, without those that were found to be bad."""
        bad = self._missing.union(*(part._missing for part in self.micro_batches))
        return self._ids[~np.isin(self._ids, list(bad))] if bad else self._ids

    @property
    def x(self) -> Any:
        """The first part of samples that are pairs or longer, else the samples themselves."""
        return self.data[0] if isinstance(self.data, (tuple, list)) else self.data

    @property
    def y(self) -> Any:
        """The second part of samples that are pairs or longer. DataError if there is none."""
        if isinstance(self.data, (tuple, list)) and len(self.data) > 1:
            return self.data[1]
        raise DataError("a sample has no second part", hint="use batch.data where samples are not (x, y) pairs")

    def __len__(self) -> int:
        return len(self._positions) - len(self._missing)

    def become(self, other: Batch) -> None:
        """Be ``other`` from now on, for all references to this one."""
        outdated = any(part._read or part.outdated for part in (self, *self.micro_batches))
        self.__dict__.update(other.__dict__)
        if len(self.micro_batches) == 1:
            self.micro_batches = (self,)
        for part in (self, *self.micro_batches):
            part.outdated = outdated

    def release(self) -> None:
        """Forget the data; the next use fetches them again."""
        self._data, self._fetched = None, False


class Fetcher:
    """Turns sample numbers into collated data on ``device``.

    ``seed`` None: random numbers are not keyed by the sample, and set_epoch is not called (evaluation).
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device,
        collate: Collate | None = None,
        *,
        seed: int | None = None,
        loading: Loading | None = None,
        tally: Tally | None = None,
    ) -> None:
        loading = loading if loading is not None else Loading()
        self._loading, self._device = loading, device
        self._tally = tally if tally is not None else Tally()
        self._reader = SampleReader(dataset, collate, seed, skips=loading.bad_samples == "skip")
        self.length = self._reader.length
        self._streams = dataset if isinstance(dataset, Streams) else None
        self._tensors = dataset.tensors if plain_tensors(dataset) and collate is None else None
        self._pin = loading.pins(device)
        self._in_place = self._tensors is not None and all(t.device == device for t in self._tensors)
        self._on_host = self._tensors is not None and all(t.device.type == "cpu" for t in self._tensors)
        ahead = loading.workers and self._tensors is None  # rows of tensors are there already
        if ahead and (lacking := torch_internals.lacking([torch_internals.DATA_WORKERS])):
            logger().warning("data.workers_refused", reason=lacking[0])
            ahead = 0
        self._workers = Workers(self._reader, loading, pin=self._pin) if ahead else None
        self._world = 1

    @property
    def immediate(self) -> bool:
        """Whether no step ever waits for samples: they are rows of tensors in memory."""
        return self._tensors is not None

    def __call__(self, ids: Ids) -> Drawn:
        """The samples ``ids``, in this process."""
        return self._drawn(SampleRequest(0, int(ids[0]) if len(ids) else 0, ids))

    def draw(self, request: SampleRequest) -> Drawn:
        """The samples of ``request``, perhaps fetched ahead."""
        if self._workers is None:
            drawn = self._drawn(request)
        else:
            got = self._workers.get(request)
            drawn = Drawn(placed(got.data, self._device), got.missing)
        if drawn.missing and request.counts:
            most = limit(self.length, self._world, self._loading.max_bad_fraction)
            self._tally.note(request.epoch, drawn.missing, most)
        return drawn

    def follow(self, course: Course) -> None:
        """The next requests lie on ``course``."""
        self._world = course.world
        if self._workers is not None:
            self._workers.future = course.from_request

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if self._streams is not None:
            self._streams.close()

    def _drawn(self, request: SampleRequest) -> Drawn:
        if self._tensors is not None:
            rows = self._rows(torch.from_numpy(request.ids.astype(np.int64)), self._tensors)
            return Drawn(rows if self._in_place else [self._placed(each) for each in rows])
        if not self._reader.draws:
            drawn = self._reader.read(request)
        else:
            with undisturbed(self._reader.draws):
                drawn = self._reader.read(request)
        return Drawn(self._placed(drawn.data), drawn.missing)

    def _rows(self, index: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensor[index]``; in a third of the time on the CPU, where alone index_select takes an index from there."""
        if self._on_host:
            return [tensor.index_select(0, index) for tensor in tensors]
        return [tensor[index] for tensor in tensors]

    def _placed(self, data: Any) -> Any:
        return placed(pinned(data) if self._pin else data, self._device)


class Source(Protocol):
    """Where a sampler gets its data."""

    def draw(self, request: SampleRequest) -> Drawn: ...

    def follow(self, course: Course) -> None: ...


class Sampler:
    """Draws the batches of an epoch plan. ``even``: see :func:`elastic_trainer.data.plan.share`.

    ``until`` is the epoch before which drawing ends, where that is known: data may be fetched ahead up to there.
    """

    def __init__(self, source: Source, plan: EpochPlan, *, even: bool = False, until: int = 0) -> None:
        self.plan = plan
        self._source, self._even, self._until = source, even, until
        self._course: Course | None = None

    def draw(self, cursor: Cursor, rank: int, world: int, halvings: int = 0) -> Batch:
        plan = self.plan.at(world)
        course = self._course
        asked_for = (rank, world, halvings)
        if course is None or course.where != asked_for or course.until <= cursor.epoch:
            course = self._course = Course(plan, rank, world, max(self._until, cursor.epoch + 1), self._even, halvings)
            self._source.follow(course)
        whole, size = plan.global_batch_at(cursor), plan.micro_batch
        pieces = course.pieces(whole)
        if len(pieces) == 1:
            return self._batch(whole, pieces[0], size)
        micro_batches = tuple(self._batch(whole, piece, size) for piece in pieces)
        return self._batch(whole, spanning(pieces), size, micro_batches)

    def _batch(self, whole: GlobalBatch, piece: Piece, size: int | None, parts: tuple[Batch, ...] = ()) -> Batch:
        request = asked(whole, piece, span=bool(parts))
        number = None
        if size is not None and piece.counts and not parts and piece.start % size == 0:
            number = piece.start // size
        return Batch(
            lambda _: self._source.draw(request),
            request.ids,
            request.ids if piece.counts else request.ids[:0],
            weight=piece.weight,
            whole=whole,
            offset=piece.start,
            number=number,
            parts=-(-len(whole.ids) // size) if size is not None else 1,
            micro_batches=parts,
        )
