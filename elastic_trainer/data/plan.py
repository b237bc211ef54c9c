"""Which samples make up each global batch of an epoch, how a batch is divided over the ranks, and what a rank draws,
piece by piece, from a position in the data on. Pure.

The order of an epoch depends on (seed, epoch) alone, never on the number of ranks; the position in it is a global
count of samples. So every sample of an epoch is used exactly once under any schedule of world sizes. A piece is known
by its extent (epoch, first position, size): two ranks, two rounds or two lives of a job that ask for one extent ask
for the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.model import Cursor

Ids = NDArray[np.int64] | NDArray[np.int32]
"""Numbers of samples."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One micro-batch of one rank: positions ``start`` to ``stop`` of a global batch.

    ``weight`` is what its mean loss is multiplied by; 0 marks a filler, computed only so that collectives match.
    """

    start: int
    stop: int
    weight: float

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def counts(self) -> bool:
        """Whether its samples contribute to the gradient."""
        return self.weight > 0.0


@dataclass(slots=True)
class GlobalBatch:
    """The samples ``ids`` that all ranks together train on in one step.

    ``index`` counts the batches of the epoch from 0; ``following`` is the cursor once this batch is committed.
    """

    ids: Ids
    cursor: Cursor
    following: Cursor
    index: int


class LrRule(StrEnum):
    """What becomes of the learning rate where the global batch is r times as large as the one it was chosen for."""

    NONE = "none"
    LINEAR = "linear"
    """r times (Goyal et al. 2017, "Accurate, Large Minibatch SGD")."""
    SQRT = "sqrt"
    """The square root of r times (Krizhevsky 2014, "One weird trick"), usual with adaptive optimizers."""

    def factor(self, ratio: float) -> float:
        return {LrRule.NONE: 1.0, LrRule.LINEAR: ratio, LrRule.SQRT: math.sqrt(ratio)}[self]


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How a data set of ``length`` samples is cut into global batches.

    By default the number of ranks has no part in it. With ``scale_from`` the global batch is the one for that many
    ranks, and with W ranks it is W / scale_from times as large; the learning rate follows by ``lr_rule``. With
    ``passes`` each rank computes its part of a whole global batch in that many micro-batches. With ``drop_last`` an
    epoch leaves out the samples at the end of its order that do not fill a global batch (with ``passes``: one pass).
    """

    length: int
    global_batch: int
    micro_batch: int | None = None
    seed: int = 0
    shuffle: bool = True
    scale_from: int | None = None
    lr_rule: LrRule = LrRule.NONE
    passes: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError("the data set is empty", hint="training needs at least one sample")
        if self.global_batch < 1:
            raise ConfigError(f"global_batch_size is {self.global_batch}", hint="it must be at least 1")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.global_batch:
            raise ConfigError(
                f"micro_batch_size is {self.micro_batch} for a global batch of {self.global_batch}",
                hint="it must be between 1 and global_batch_size",
            )
        if self.passes is not None and (self.micro_batch is not None or not 1 <= self.passes <= self.global_batch):
            raise ConfigError(
                f"passes is {self.passes} for a global batch of {self.global_batch}",
                hint="it must be between 1 and global_batch_size, and goes without micro_batch_size",
            )
        if self.length < self._unit:
            raise DataError(
                f"the data set has {self.length} samples, and drop_last leaves none for batches of {self._unit}",
                hint="leave drop_last out, or take a smaller batch",
            )
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", hint="it must not be negative")
        if self.scale_from is not None and self.scale_from < 1:
            raise ConfigError(f"scale_from is {self.scale_from}", hint="say for how many ranks the batch was chosen")
        if self.scale_from is None and self.lr_rule is not LrRule.NONE:
            raise ConfigError(
                f"lr_rule is {self.lr_rule!s} and the global batch is fixed", hint="say scale_from=..., or leave it out"
            )

    def for_world(self, world: int) -> EpochPlan:
        if self.scale_from is None or world == self.scale_from:
            return self
        size = max(1, round(self.global_batch * world / self.scale_from))
        micro = min(self.micro_batch, size) if self.micro_batch is not None else None
        passes = min(self.passes, size) if self.passes is not None else None
        return EpochPlan(self.length, size, micro, self.seed, self.shuffle, passes=passes, drop_last=self.drop_last)

    @property
    def _unit(self) -> int:
        """An epoch takes a multiple of that many samples."""
        return self.global_batch // (self.passes or 1) if self.drop_last else 1

    @property
    def steps(self) -> int:
        """How many global batches an epoch has."""
        return -(-self.left(Cursor()) // self.global_batch)

    @property
    def most_parts(self) -> int:
        """Into how many parts a full global batch can be divided."""
        return -(-self.global_batch // self.micro_batch) if self.micro_batch is not None else self.global_batch

    def lr_factor(self, world: int) -> float:
        """What the learning rate is multiplied by at ``world`` ranks."""
        if self.scale_from is None:
            return 1.0
        return self.lr_rule.factor(self.for_world(world).global_batch / self.global_batch)

    def passes_of(self, count: int) -> int:
        """How many micro-batches each rank computes of a global batch of ``count`` samples, if ``passes`` are fixed."""
        return max(1, -(-count * self.passes // self.global_batch)) if self.passes is not None else 1

    def order(self, epoch: int) -> Ids:
        """The sample numbers of ``epoch`` in training order (read-only)."""
        return epoch_order(self.length, self.seed, epoch, self.shuffle)

    def left(self, cursor: Cursor) -> int:
        """How many samples of the epoch are still to be trained on."""
        rest = max(0, self.length - cursor.samples)
        return rest - rest % self._unit

    def is_over(self, cursor: Cursor) -> bool:
        return self.left(cursor) == 0

    def global_batch_at(self, cursor: Cursor) -> GlobalBatch:
        """The global batch that begins at ``cursor``; the last one of an epoch may be smaller, and is never padded.

        Raises ValueError when the epoch has ended.
        """
        if self.is_over(cursor):
            raise ValueError(f"epoch {cursor.epoch} has {self.length} samples; nothing is left at {cursor.samples}")
        stop = cursor.samples + min(self.global_batch, self.left(cursor))
        ids = self.order(cursor.epoch)[cursor.samples : stop] if self.shuffle else np.arange(cursor.samples, stop)
        return GlobalBatch(ids, cursor, Cursor(cursor.epoch, stop), cursor.samples // self.global_batch)


@lru_cache(maxsize=2)
def epoch_order(length: int, seed: int, epoch: int, shuffle: bool) -> Ids:
    """A permutation of ``range(length)`` keyed by (seed, epoch), or that range itself without ``shuffle``.

    Kept for two epochs, since each step asks for it. Ten million samples take about half a second.
    """
    if not shuffle:
        ordered: Ids = np.arange(length)
    else:
        ordered = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch)))).permutation(length)
    if length <= np.iinfo(np.int32).max:
        ordered = ordered.astype(np.int32)
    ordered.setflags(write=False)
    return ordered


@lru_cache(maxsize=8)
def share(
    count: int, micro_batch: int | None, world: int, rank: int, *, even: bool = False, passes: int = 1
) -> tuple[Piece, ...]:
    """The micro-batches of ``rank`` in a global batch of ``count`` samples, at least one.

    With ``micro_batch`` the batch is cut into micro-batches of that size (the last one smaller) and these are dealt
    out in contiguous runs that differ by at most one; without it the ranks' parts differ by at most one sample, and
    each is cut into ``passes`` micro-batches. A rank for which nothing is left gets one filler. ``even`` adds fillers
    until all ranks have equally many micro-batches, for models with collectives in the forward pass.

    Weights: let a micro-batch of n samples have the mean loss l. Summing ``W * n / count * l`` over all micro-batches
    and dividing by the W ranks, as DistributedDataParallel does with gradients, gives the mean over the global batch.
    """
    if micro_batch is None:
        start, stop = cut(count, world, rank)
        cuts = [cut(stop - start, passes, number) for number in range(passes)]
        pieces = [_piece(start + first, start + last, count, world) for first, last in cuts if last > first]
        filler, wanted = Piece(0, cut(cut(count, world, 0)[1], passes, 0)[1], 0.0), passes
    else:
        total = -(-count // micro_batch)
        begin, end = cut(total, world, rank)
        pieces = [_piece(i * micro_batch, min((i + 1) * micro_batch, count), count, world) for i in range(begin, end)]
        filler, wanted = Piece(0, min(micro_batch, count), 0.0), -(-total // world) if even else 1
    pieces += [filler] * (wanted - len(pieces))
    return tuple(pieces)


def halved(pieces: tuple[Piece, ...], times: int, *, even: bool = False) -> tuple[Piece, ...]:
    """``pieces`` in parts of half the size, this many ``times``; ``even`` makes fillers of parts without samples."""
    found: list[Piece] = []
    for piece in pieces:
        ends = [cut(piece.size, 2**times, number) for number in range(2**times)]
        for first, last in ends:
            if last > first:
                weight = piece.weight * (last - first) / piece.size
                found.append(Piece(piece.start + first, piece.start + last, weight))
            elif even:
                found.append(Piece(piece.start, piece.start + 1, 0.0))
    return tuple(found)


def cut(total: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of ``part`` when ``range(total)`` is cut into contiguous ``parts`` that differ by at most one."""
    size, rest = divmod(total, parts)
    begin = part * size + min(part, rest)
    return begin, begin + size + (part < rest)


def _piece(start: int, stop: int, count: int, world: int) -> Piece:
    return Piece(start, stop, world * (stop - start) / count)


Extent = tuple[int, int, int]
"""Epoch, position of the first sample in it, number of samples."""


@dataclass(slots=True, eq=False)
class SampleRequest:
    """The samples ``ids``, which begin at ``position`` of ``epoch``.

    ``batch_start`` is where their global batch begins. ``counts`` is False for a filler; ``span``: this is
    all of a rank's part at once, although it has several micro-batches.
    """

    epoch: int
    position: int
    ids: Ids
    batch_start: int = 0
    counts: bool = True
    span: bool = False

    @property
    def extent(self) -> Extent:
        return self.epoch, self.position, len(self.ids)


@dataclass(frozen=True, slots=True)
class Course:
    """Where a rank goes through the data: its share of ``plan``, up to the epoch ``until`` (excluded)."""

    plan: EpochPlan
    rank: int
    world: int
    until: int
    even: bool = False
    halvings: int = 0

    def pieces(self, whole: GlobalBatch) -> tuple[Piece, ...]:
        count, plan = len(whole.ids), self.plan
        pieces = share(count, plan.micro_batch, self.world, self.rank, even=self.even, passes=plan.passes_of(count))
        return halved(pieces, self.halvings, even=self.even) if self.halvings else pieces

    def from_request(self, first: SampleRequest) -> Iterator[SampleRequest]:
        """``first``, and what this rank will ask for after it, in order; no extent twice in a row."""
        yield first
        last, cursor = first.extent, Cursor(first.epoch, first.batch_start)
        rest: list[SampleRequest] | None = None
        while True:
            if self.plan.is_over(cursor):
                if cursor.epoch + 1 >= self.until:
                    return
                cursor = Cursor(cursor.epoch + 1, 0)
            whole = self.plan.global_batch_at(cursor)
            requests = self._requests(whole, span=first.span)
            rest = _behind(requests, first.extent) if rest is None else requests
            for request in rest:
                if request.extent != last:
                    yield request
                    last = request.extent
            cursor = whole.following

    def _requests(self, whole: GlobalBatch, *, span: bool) -> list[SampleRequest]:
        pieces = self.pieces(whole)
        if span and len(pieces) > 1:
            return [asked(whole, spanning(pieces), span=True)]
        return [asked(whole, piece) for piece in pieces]


def asked(whole: GlobalBatch, piece: Piece, *, span: bool = False) -> SampleRequest:
    """The request for ``piece`` of the global batch ``whole``."""
    ids, cursor = whole.ids[piece.start : piece.stop], whole.cursor
    return SampleRequest(cursor.epoch, cursor.samples + piece.start, ids, cursor.samples, piece.weight > 0.0, span)


def spanning(pieces: tuple[Piece, ...]) -> Piece:
    """All that counts of a rank's ``pieces``, which are contiguous, as one; the first filler if nothing counts."""
    counting = [piece for piece in pieces if piece.counts] or [pieces[0]]
    return Piece(counting[0].start, counting[-1].stop, sum(piece.weight for piece in pieces))


def _behind(requests: list[SampleRequest], extent: Extent) -> list[SampleRequest]:
    """Those after the one at ``extent``; none if it is not among them."""
    extents = [request.extent for request in requests]
    return requests[extents.index(extent) + 1 :] if extent in extents else []
