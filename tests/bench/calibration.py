"""How fast this machine is now: what three fixed pieces of work take, and by how much promises of a time are scaled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass
from statistics import median

import numpy as np

REFERENCE_SUM_US = 100.0
"""``sum(range(10_000))`` on the machine for which promises in seconds are made."""
ROUNDS = 51
MEGABYTE = 1_000_000
SIDE = 64


@dataclass(frozen=True, slots=True)
class Calibration:
    """Microseconds of ``sum(range(10_000))``, of a copy of 1 MB, and of the product of two small float32 matrices."""

    sum_us: float
    memcpy_us: float
    product_us: float

    @property
    def scale(self) -> float:
        """How much longer than on the reference machine the interpreter's work takes here."""
        return self.sum_us / REFERENCE_SUM_US

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "scale": self.scale}


def calibrate(rounds: int = ROUNDS) -> Calibration:
    """Medians of ``rounds`` measurements of each; takes some 30 ms."""
    source, target = memoryview(bytes(MEGABYTE)), memoryview(bytearray(MEGABYTE))
    factor = np.ones((SIDE, SIDE), np.float32)
    product = np.empty_like(factor)

    def copy() -> None:
        target[:] = source

    work: tuple[Callable[[], object], ...] = (
        lambda: sum(range(10_000)),
        copy,
        lambda: np.matmul(factor, factor, out=product),
    )
    taken = [[_us(each) for each in work] for _ in range(rounds)]
    return Calibration(*map(median, zip(*taken, strict=True)))


def typical(calibrations: Iterable[Calibration]) -> Calibration:
    """The median of each figure: the speed over the whole of a benchmark, when it was taken now and then."""
    return Calibration(*map(median, zip(*map(astuple, calibrations), strict=True)))


def _us(work: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1000
