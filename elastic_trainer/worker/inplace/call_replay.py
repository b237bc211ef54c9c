"""Replays calls that all ranks make together, when a round ends in the middle of one.

Some ranks may have completed the call and continued, others not; simply repeating it would bring them out of step. So
ranks count completed calls, and a rank that is one call behind receives the result from one that has completed it.

*Runs in* the worker's main thread of all ranks at once. *Fails by* RoundBrokenError when a peer is gone.
*Invariant*: ranks of one round differ by at most one call, since all of them are needed to complete the next. A rank
that was a spare meanwhile, or is new, continues from where the others are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from elastic_trainer.worker.comm.codecs import Codec
from elastic_trainer.worker.comm.control import Control

NEWCOMER = -1


class CallReplay:
    """Counts completed calls. ``count`` is NEWCOMER until this rank has met others."""

    def __init__(self) -> None:
        self.count = NEWCOMER
        self.inside = False
        """Whether the round ended here in the middle of a call."""
        self._last = b""
        self._answer: bytes | None = None

    @property
    def has_answer(self) -> bool:
        """Whether a peer has completed the call that this rank is in."""
        return self._answer is not None

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """In the body this rank meets others for the call that it is in."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def completed(self, result: Any, codec: Codec) -> Any:
        """Count a call that completed here, and return its result."""
        self.count = max(0, self.count) + 1
        self._last = codec.encode(result)
        return result

    def answer(self, codec: Codec) -> Any:
        """The result that a peer sent; the call counts as completed here."""
        data, self._answer = cast("bytes", self._answer), None
        self.count += 1
        self._last = data
        return codec.decode(data)

    def meet(self, control: Control, counts: Sequence[int]) -> None:
        """At the start of a round, send the last result to the ranks that are behind."""
        most, self._answer = max(counts), None
        if any(0 <= count < most for count in counts):
            data = control.broadcast_bytes(self._last, counts.index(most))
            if self.count < most:
                self._last = data
                self._answer = data if self.inside else None
        self.count = max(0, most - self.has_answer)
