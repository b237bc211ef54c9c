"""The schedule of pairwise all-reduces, and the judgment of their times. Pure.

A node is slow if even its fastest pair is much slower than the median of the pairs without it. (The median of all pairs
would fail: with one slow node of three, two of three pairs are slow.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from elastic_trainer.preflight.finding import Finding, Status, amount, size_text
from elastic_trainer.preflight.limits import MIB, FitLimits

SIZES: Final = (4096, MIB, 16 * MIB)
"""Bytes of the all-reduces, from latency-bound to bandwidth-bound; the largest is judged."""
MOST_TURNS: Final = 31
"""Up to 32 nodes each is paired with every other; beyond that, with this many others."""

Pair = tuple[int, int]
"""Two ranks, the lower first."""


def turns(count: int, most: int = MOST_TURNS) -> list[list[Pair]]:
    """The pairs of each turn. No node is in two pairs of a turn, or paired with another twice (a round robin)."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(min(most, len(places) - 1)):
        half = len(places) // 2
        drawn = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in drawn if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """The all-reduces of a pair, or of all nodes together: seconds by bytes. ``error``: why there are none."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    error: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes per second of the largest; None if that was not measured."""
        largest = max(self.seconds, default=0)
        return largest / self.seconds[largest] if largest else None


def judge(names: Sequence[str], me: int, pairs: Mapping[Pair, Measured], limits: FitLimits) -> list[Finding]:
    """The findings of node ``me`` from the pairs' times: its own faults are bad, those of others are warnings."""
    rates = {pair: measured.rate for pair, measured in pairs.items() if measured.rate is not None}
    found = [_mine(names, me, rates)] if any(me in pair for pair in rates) else []
    found += _failed(names, me, pairs)
    slow = dict(slow_nodes(rates, limits.ratio))
    for rank, (rate, middle) in slow.items():
        who = "this node" if rank == me else names[rank]
        text = f"{who} is slow with every other: at best {_speed(rate)}, {_speed(middle)} is the others' median"
        status = Status.BAD if rank == me else Status.WARN
        found.append(_slow("allreduce.node", status, text, rate / middle, limits))
    for pair, rate, middle in slow_pairs(rates, slow, limits.ratio):
        text = f"{names[pair[0]]} and {names[pair[1]]} are slow together: {_speed(rate)}, median {_speed(middle)}"
        found.append(_slow("allreduce.pair", Status.WARN, text, rate / middle, limits))
    return found


def _slow(name: str, status: Status, text: str, ratio: float, limits: FitLimits) -> Finding:
    hint = "look for other load, and at cables and switches"
    return Finding(name, status, text, ratio, "of median", limits.ratio, hint)


def slow_nodes(rates: Mapping[Pair, float], ratio: float) -> Iterator[tuple[int, tuple[float, float]]]:
    """Ranks whose best rate is below ``ratio`` of the median of the pairs without them, with both rates."""
    for rank in sorted({rank for pair in rates for rank in pair}):
        others = [rate for pair, rate in rates.items() if rank not in pair]
        best = max(rate for pair, rate in rates.items() if rank in pair)
        if others and best < ratio * median(others):
            yield rank, (best, median(others))


def slow_pairs(
    rates: Mapping[Pair, float], slow: Mapping[int, object], ratio: float
) -> Iterator[tuple[Pair, float, float]]:
    """Slow pairs of nodes that are not slow themselves, with their rate and the median of the others."""
    fair = {pair: rate for pair, rate in rates.items() if not set(pair) & set(slow)}
    for pair, rate in fair.items():
        others = [other for each, other in fair.items() if each != pair]
        if others and rate < ratio * median(others):
            yield pair, rate, median(others)


def together(measured: Measured, count: int) -> Finding:
    """The finding for the all-reduce of all nodes."""
    name = f"allreduce.all{count}"
    if measured.rate is None:
        return Finding(name, Status.BAD, f"the all-reduce of all {count} nodes failed: {measured.error}", hint=_HINT)
    return Finding(name, Status.OK, _times(measured), measured.rate / 1e6, "MB/s")


_HINT = "check GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME), host names and firewalls: ranks connect on any port"


def _mine(names: Sequence[str], me: int, rates: Mapping[Pair, float]) -> Finding:
    own = {pair: rate for pair, rate in rates.items() if me in pair}
    middle = median(own.values())
    worst = min(own, key=lambda pair: own[pair])
    partner = names[worst[0] if worst[1] == me else worst[1]]
    text = f"{_speed(middle)} with one other node" + (
        f" (median of {len(own)}; the slowest is {partner}, {_speed(own[worst])})" if len(own) > 1 else f", {partner}"
    )
    return Finding("allreduce.pairs", Status.OK, text, middle / 1e6, "MB/s")


def _failed(names: Sequence[str], me: int, pairs: Mapping[Pair, Measured]) -> Iterator[Finding]:
    """Findings for pairs without a time; a node that failed with all others is named once."""
    failed = {pair: measured.error for pair, measured in pairs.items() if measured.rate is None}
    named = set[Pair]()
    for rank in sorted({rank for pair in failed for rank in pair}):
        own = [pair for pair in pairs if rank in pair]
        if len(own) > 1 and all(pair in failed for pair in own) and not set(own) <= named:
            named |= set(own)
            who = "this node" if rank == me else names[rank]
            status = Status.BAD if rank == me else Status.WARN
            yield Finding("allreduce.node", status, f"{who} reached none of {len(own)}: {failed[own[0]]}", hint=_HINT)
    for pair, error in failed.items():
        if pair not in named:
            status = Status.BAD if me in pair else Status.WARN
            text = f"{names[pair[0]]} and {names[pair[1]]} cannot all-reduce: {error}"
            yield Finding("allreduce.pair", status, text, hint=_HINT)


def _speed(rate: float) -> str:
    return f"{amount(rate / 1e6)} MB/s"


def _times(measured: Measured) -> str:
    parts = [f"{amount(seconds * 1e3)} ms for {size_text(size)}" for size, seconds in sorted(measured.seconds.items())]
    return ", ".join(parts)
