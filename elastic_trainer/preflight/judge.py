"""What checks find, and whether a node is fit to train with these others. Pure: same reports give the same verdict.

*Clocks* of two nodes are never compared directly. A document that etcd accepted between two of our reads was written
between their times: if its published time lies outside, one of the clocks is wrong. This gives only a lower bound of
the offset, which misleads people who read logs; nothing in this package depends on it.

*Pairs*: a node is slow if even its fastest pair is much slower than the median of the pairs without it. (The median of
all pairs would fail: with one slow node of three, two of three pairs are slow.)

*Reports*: a node is unfit if it computes or copies much more slowly than the others' median (a job runs at the speed of
its slowest rank), or if its torch, CUDA or NCCL version differs from that of most nodes. In a tie older nodes decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Any, Final

from pydantic import Field

from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.membership.documents import Document
from elastic_trainer.wording import counted


class Status(StrEnum):
    """The judgment of a finding."""

    OK = "ok"
    WARN = "warn"
    """It may slow a job, or hurt it later."""
    BAD = "bad"
    """No job should run here."""
    SKIPPED = "skipped"
    """The check did not run; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``value`` was compared with ``limit``; both are in ``unit``."""

    name: str
    status: Status
    text: str
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    hint: str = ""

    @classmethod
    def of_error(cls, name: str, error: ElasticTrainerError) -> Finding:
        """The finding of the check ``name`` that failed with ``error``."""
        return cls(name, Status.BAD, error.message, hint=error.hint or "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def but(self, status: Status, hint: str, text: str | None = None) -> Finding:
        """The same value with another judgment."""
        return replace(self, status=status, hint=hint, text=self.text if text is None else text)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        return cls(**{**values, "status": Status(values["status"])})


def bad(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings because of which no job should run here."""
    return tuple(finding for finding in findings if finding.status is Status.BAD)


def sentence(findings: Iterable[Finding]) -> str:
    """All findings in one line."""
    return "; ".join(f"{finding.name}: {finding.text}" for finding in findings)


def amount(value: float) -> str:
    """Three digits, without an exponent where possible."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size_text(size: float) -> str:
    """A number of bytes in powers of 1024."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{amount(size)} {unit}"


# ---- limits

MIB: Final = 1 << 20
GIB: Final = 1 << 30
NODE_CHECKS_S: Final = 120.0
"""Longest time for the checks of a node that wants to join; the first import of torch is in it."""
PEERS_WAIT_S: Final = 10.0
"""Longest time that it waits for other nodes' results to compare with."""


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Times in seconds, sizes in bytes. Only limits marked Bad make a node unfit; the others give warnings."""

    ratio: float = 0.5
    """Bad: computes or copies at less than this fraction of the other nodes' median; also for a pair of nodes."""
    peers: int = 2
    """Minimum number of other nodes for a median."""
    disk_bytes: int = 0
    """Bad: less free space for checkpoints. 0: the needed space is unknown."""
    disk_doubtful_bytes: int = GIB
    """Less gives a warning if the needed space is unknown."""
    disk_speed: float = 50e6
    """Bytes per second, written or read."""
    shm_bytes: int = GIB
    """Container engines provide 64 MiB, which data workers and NCCL soon fill."""
    shm_least_bytes: int = MIB
    """Bad: not even this amount can be written."""
    open_files: int = 4096
    etcd_round_trip_s: float = 0.1
    etcd_version: tuple[int, int] = (3, 4)
    clock_s: float = 1.0


_CLOCK_HINT = "enable time synchronization (NTP): training does not depend on it, but logs and graphs will mislead"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A revision of the store and our wall clock (Unix time) just before and just after it was read."""

    revision: int
    before: float
    after: float


def least_offset(revision: int, wall: float, first: Anchor, last: Anchor) -> float:
    """Lower bound of a writer's clock offset in seconds (negative: behind); 0 if its clock may be right.

    ``revision`` is that of the last write of its document, ``wall`` the time that this document tells.
    """
    if revision <= first.revision:
        return max(0.0, wall - first.after)
    if revision > last.revision:
        return min(0.0, wall - last.before)
    return max(0.0, wall - last.after) + min(0.0, wall - first.before)


def clock_finding(told: Mapping[str, tuple[int, float]], first: Anchor, last: Anchor, limits: FitLimits) -> Finding:
    """The finding for the largest offset. ``told``: revision and time of each other node's document."""
    offsets = {node: least_offset(revision, wall, first, last) for node, (revision, wall) in told.items()}
    if not offsets:
        return Finding("run.clock", Status.SKIPPED, "no other node has published its time")
    return judged_clocks("run.clock", offsets, limits, "at least ")


def judged_clocks(name: str, offsets: dict[str, float], limits: FitLimits, prefix: str = "") -> Finding:
    """The finding for clock ``offsets`` (seconds ahead of ours, by node)."""
    node, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    text = f"agrees with {counted(len(offsets), 'other node')}, within the precision of this check"
    found = Finding(name, Status.OK, text, worst, "s", limits.clock_s)
    if abs(worst) <= limits.clock_s:
        return found
    side = "ahead of" if worst > 0 else "behind"
    return found.but(Status.WARN, _CLOCK_HINT, f"the clock of {node} is {prefix}{abs(worst):.3g} s {side} this node's")


# ---- pairs

SIZES: Final = (4096, MIB, 16 * MIB)
"""Bytes of the all-reduces, from latency-bound to bandwidth-bound; the largest is judged."""
MOST_TURNS: Final = 31
"""Up to 32 nodes each is paired with every other; beyond that, with this many others."""

Pair = tuple[int, int]
"""Two ranks, the lower first."""


def turns(count: int, most: int = MOST_TURNS) -> list[list[Pair]]:
    """The pairs of each turn. No node is in two pairs of a turn, or paired with another twice (a round robin)."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(min(most, len(seats) - 1)):
        half = len(seats) // 2
        drawn = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in drawn if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
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


def judge_pairs(names: Sequence[str], me: int, pairs: Mapping[Pair, Measured], limits: FitLimits) -> list[Finding]:
    """The findings of node ``me`` from the pairs' times: its own faults are bad, those of others are warnings."""
    rates = {pair: measured.rate for pair, measured in pairs.items() if measured.rate is not None}
    found = [_mine(names, me, rates)] if any(me in pair for pair in rates) else []
    found += _failed(names, me, pairs)
    slow = dict(slow_nodes(rates, limits.ratio))
    hint = "look for other load, and at cables and switches"
    for rank, (rate, middle) in slow.items():
        who, status = ("this node", Status.BAD) if rank == me else (names[rank], Status.WARN)
        text = f"{who} is slow with every other: at best {_speed(rate)}, {_speed(middle)} is the others' median"
        found.append(Finding("allreduce.node", status, text, rate / middle, "of median", limits.ratio, hint))
    for pair, rate, middle in slow_pairs(rates, slow, limits.ratio):
        text = f"{names[pair[0]]} and {names[pair[1]]} are slow together: {_speed(rate)}, median {_speed(middle)}"
        found.append(Finding("allreduce.pair", Status.WARN, text, rate / middle, "of median", limits.ratio, hint))
    return found


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


def together_finding(measured: Measured, count: int) -> Finding:
    """The finding for the all-reduce of all nodes."""
    name = f"allreduce.all{count}"
    if measured.rate is None:
        text = f"the all-reduce of all {count} nodes failed: {measured.error}"
        return Finding(name, Status.BAD, text, hint=_REACH_HINT)
    times = (f"{amount(seconds * 1e3)} ms for {size_text(size)}" for size, seconds in sorted(measured.seconds.items()))
    return Finding(name, Status.OK, ", ".join(times), measured.rate / 1e6, "MB/s")


_REACH_HINT = "check GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME), host names and firewalls: ranks connect on any port"


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
            who, status = ("this node", Status.BAD) if rank == me else (names[rank], Status.WARN)
            text = f"{who} reached none of {len(own)}: {failed[own[0]]}"
            yield Finding("allreduce.node", status, text, hint=_REACH_HINT)
    for pair, error in failed.items():
        if pair not in named:
            status = Status.BAD if me in pair else Status.WARN
            text = f"{names[pair[0]]} and {names[pair[1]]} cannot all-reduce: {error}"
            yield Finding("allreduce.pair", status, text, hint=_REACH_HINT)


def _speed(rate: float) -> str:
    return f"{amount(rate / 1e6)} MB/s"


# ---- reports

MUST_AGREE: Final = ("torch", "cuda", "nccl")
SHOULD_AGREE: Final = ("elastic_trainer", "python", "driver")
_UNITS: Final = {"matmul": "GFLOP/s", "memory": "GB/s", "disk": "MB/s"}
_SLOW_HINT = "look for other load, a CPU quota, heat, a slower model; or lower --rdzv-conf preflight_ratio"


class NodeReport(Document):
    """The checks of one node."""

    node: str
    host: str = ""
    address: str = ""
    wall: float
    """When it was written (Unix time of that node)."""
    fit: bool = True
    """Whether others should compare themselves with it."""
    text: str = ""
    """The bad findings, for people."""
    values: Mapping[str, float] = Field(default_factory=dict)
    """Values by the names of their findings, in their units."""
    versions: Mapping[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Published:
    """A report in the store."""

    report: NodeReport
    created: int
    """The create-revision of its key, which orders nodes by age."""
    revision: int


def judge(mine: Published, peers: Sequence[Published], limits: FitLimits) -> list[Finding]:
    """Compare this node's report with those of the fit others."""
    others = [peer for peer in peers if peer.report.node != mine.report.node and peer.report.fit]
    return [*_speeds(mine, others, limits), *_versions(mine, others)]


# ---- speeds


def _speeds(mine: Published, others: Sequence[Published], limits: FitLimits) -> Iterator[Finding]:
    for name, value in mine.report.values.items():
        alike = [
            [each for other, each in peer.report.values.items() if kind_of(other) == kind_of(name)] for peer in others
        ]
        pools = [pool for pool in alike if pool]
        if len(pools) >= limits.peers:
            reference, who = [each for pool in pools for each in pool], counted(len(pools), "other node")
        else:
            # A node with many devices can find a slow one by itself.
            own = [value for other, value in mine.report.values.items() if kind_of(other) == kind_of(name)]
            reference, who = (own, f"its {len(own)} devices") if len(own) > limits.peers else ([], "")
        if reference:
            yield _compared(name, value, median(reference), who, limits)
    if len(others) < limits.peers:
        text = f"{counted(len(others), 'other node')} reported speeds, {limits.peers} are needed to compare"
        yield Finding("peers.speed", Status.SKIPPED, text)


def kind_of(name: str) -> str:
    """``name`` without the device number: devices of one kind are compared with each other."""
    return re.sub(r"cuda\d+", "cuda", name)


def _compared(name: str, value: float, middle: float, who: str, limits: FitLimits) -> Finding:
    ratio = value / middle if middle > 0 else 1.0
    area = name.partition(".")[0]
    text = f"{amount(value)} {_UNITS.get(area, '')} is {ratio:.2f} of the median of {who}, {amount(middle)}"
    if ratio >= limits.ratio:
        return Finding(f"peers.{name}", Status.OK, text, ratio, "of median", limits.ratio)
    # A slow disk delays checkpoints but not the other ranks' steps.
    status = Status.WARN if area == "disk" else Status.BAD
    return Finding(f"peers.{name}", status, text, ratio, "of median", limits.ratio, _SLOW_HINT)


# ---- versions


def _versions(mine: Published, others: Sequence[Published]) -> Iterator[Finding]:
    for what in (*MUST_AGREE, *SHOULD_AGREE):
        here = _version(mine, what)
        if here is None:
            continue
        known = [(peer.created, version) for peer in others if (version := _version(peer, what)) is not None]
        there = agreed([*known, (mine.created, here)])
        if there == here:
            continue
        share = sum(version == there for _, version in known)
        text = f"{what} {here} here, {there} on {share} of {counted(len(known), 'other node')}"
        status = Status.BAD if what in MUST_AGREE else Status.WARN
        yield Finding(f"peers.{what}", status, text, hint="use the same image on all nodes")


def _version(published: Published, what: str) -> str | None:
    """The version; only ``major.minor`` for torch."""
    text = published.report.versions.get(what)
    return ".".join(text.partition("+")[0].split(".")[:2]) if text is not None and what == "torch" else text


def agreed(versions: Sequence[tuple[int, str]]) -> str:
    """The most frequent version; in a tie, that of the oldest node. ``versions``: (create-revision, version)."""
    counts = Counter(version for _, version in versions)
    most = max(counts.values())
    return min((created, version) for created, version in versions if counts[version] == most)[1]
