"""What one rank draws, piece by piece, from a position in the data on. Pure.

A piece is known by its place (epoch, first position, size): the plan alone says which samples lie there, so two ranks,
two rounds or two lives of a job that ask for the same place ask for the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_trainer.data.plan import EpochPlan, GlobalBatch, Ids, Piece, halved, share
from elastic_trainer.model import Cursor

Place = tuple[int, int, int]
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
    def place(self) -> Place:
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

    @property
    def where(self) -> tuple[int, int, int]:
        """What it goes by."""
        return self.rank, self.world, self.halvings

    def pieces(self, whole: GlobalBatch) -> tuple[Piece, ...]:
        count, plan = len(whole.ids), self.plan
        pieces = share(count, plan.micro_batch, self.world, self.rank, even=self.even, passes=plan.passes_of(count))
        return halved(pieces, self.halvings, even=self.even) if self.halvings else pieces

    def from_request(self, first: SampleRequest) -> Iterator[SampleRequest]:
        """``first``, and what this rank will ask for after it, in order; no place twice in a row."""
        yield first
        last, cursor = first.place, Cursor(first.epoch, first.batch_start)
        rest: list[SampleRequest] | None = None
        while True:
            if self.plan.ended(cursor):
                if cursor.epoch + 1 >= self.until:
                    return
                cursor = Cursor(cursor.epoch + 1, 0)
            whole = self.plan.global_batch_at(cursor)
            requests = self._requests(whole, span=first.span)
            rest = _behind(requests, first.place) if rest is None else requests
            for request in rest:
                if request.place != last:
                    yield request
                    last = request.place
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


def _behind(requests: list[SampleRequest], place: Place) -> list[SampleRequest]:
    """Those after the one at ``place``; none if it is not among them."""
    places = [request.place for request in requests]
    return requests[places.index(place) + 1 :] if place in places else []
