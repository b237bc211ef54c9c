"""Whether a node is fit to train with these others. Pure: the same reports give the same verdict on every node.

A node is unfit if it computes or copies much more slowly than the others' median (a job runs at the speed of its
slowest rank), or if its torch, CUDA or NCCL version differs from that of most nodes. In a tie the older nodes decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from elastic_trainer.preflight.finding import Finding, Status, amount, counted
from elastic_trainer.preflight.limits import FitLimits
from elastic_trainer.preflight.report import Published

MUST_AGREE: Final = ("torch", "cuda", "nccl")
SHOULD_AGREE: Final = ("elastic_trainer", "python", "driver")
_UNITS: Final = {"matmul": "GFLOP/s", "memory": "GB/s", "disk": "MB/s"}
_SLOW_HINT = "look for other load, a CPU quota, heat, a slower model; or lower --rdzv-conf preflight_ratio"


def judge(mine: Published, peers: Sequence[Published], limits: FitLimits) -> list[Finding]:
    """Compare this node's report with those of the fit others."""
    others = [peer for peer in peers if peer.report.node != mine.report.node and peer.report.fit]
    return [*_speeds(mine, others, limits), *_versions(mine, others)]


# ---- speeds


def _speeds(mine: Published, others: Sequence[Published], limits: FitLimits) -> Iterator[Finding]:
    known = [_by_kind(peer.report.values) for peer in others]
    for name, value in mine.report.values.items():
        pools = [values[kind_of(name)] for values in known if kind_of(name) in values]
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


def _by_kind(values: Mapping[str, float]) -> dict[str, list[float]]:
    kinds: dict[str, list[float]] = {}
    for name, value in values.items():
        kinds.setdefault(kind_of(name), []).append(value)
    return kinds


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
    if text is None or what != "torch":
        return text
    return ".".join(text.partition("+")[0].split(".")[:2])


def agreed(versions: Sequence[tuple[int, str]]) -> str:
    """The most frequent version; in a tie, that of the oldest node. ``versions``: (create-revision, version)."""
    counts = Counter(version for _, version in versions)
    most = max(counts.values())
    return min((created, version) for created, version in versions if counts[version] == most)[1]
