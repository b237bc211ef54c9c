"""Counts and logs samples that are left out because they raise, and ends the job when there are too many.

*Runs in* the worker's main thread.
*Fails by* DataError when more of an epoch is bad than allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_trainer.errors import DataError
from elastic_trainer.telemetry.logs import logger

ALWAYS_LOGGED = 10
LEAST_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Missing:
    """Sample ``number`` could not be fetched; ``error`` says why."""

    number: int
    error: str


def limit(length: int, world: int, fraction: float) -> int:
    """How many bad samples of an epoch of ``length`` samples one of ``world`` ranks may leave out. Pure."""
    return max(LEAST_LIMIT, int(fraction * length / world))


def worth_a_line(count: int) -> bool:
    """Whether the ``count``-th bad sample is logged: the first ones all, then each time that they have doubled."""
    return count <= ALWAYS_LOGGED or count & (count - 1) == 0


class Tally:
    """``total`` is the number of samples that this process left out. One that is drawn again counts once."""

    def __init__(self) -> None:
        self.total = 0
        self._epoch = -1
        self._seen: set[int] = set()

    def note(self, epoch: int, missing: Iterable[Missing], most: int) -> None:
        """The samples ``missing`` of ``epoch`` were left out; ``most`` may be."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen.clear()
        for each in missing:
            if each.number not in self._seen:
                self._seen.add(each.number)
                self._count(each, most)

    def _count(self, missing: Missing, most: int) -> None:
        self.total += 1
        if worth_a_line(self.total):
            logger().warning(
                "data.sample_skipped",
                sample=missing.number,
                epoch=self._epoch,
                error=missing.error,
                in_epoch=len(self._seen),
                count=self.total,
            )
        if len(self._seen) > most:
            raise DataError(
                f"{len(self._seen)} samples of epoch {self._epoch} could not be fetched here, and at most {most} may"
                f" be left out; the last is sample {missing.number}: {missing.error}",
                hint="repair the data, or raise max_bad_fraction",
            )
