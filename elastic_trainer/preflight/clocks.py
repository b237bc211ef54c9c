"""Offsets of other nodes' clocks, proved by the order in which etcd accepted their writes.

Clocks of two nodes are never compared directly. A document that etcd accepted between two of our reads was written
between their times: if its published time lies outside, one of the clocks is wrong. This gives only a lower bound of
the offset. An offset misleads people who read logs; nothing in this package depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_trainer.preflight.finding import Finding, Status, counted
from elastic_trainer.preflight.limits import FitLimits

_HINT = "enable time synchronization (NTP): training does not depend on it, but logs and graphs will mislead"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A revision of the store and our wall clock (Unix time) just before and just after it was read."""

    revision: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Dated:
    """A document of another node: the revision of its last write, and the time that it published."""

    node: str
    revision: int
    wall: float


def least_offset(document: Dated, first: Anchor, last: Anchor) -> float:
    """Lower bound of the writer's clock offset in seconds (negative: behind); 0 if the clock may be right."""
    if document.revision <= first.revision:
        return max(0.0, document.wall - first.after)
    if document.revision > last.revision:
        return min(0.0, document.wall - last.before)
    return max(0.0, document.wall - last.after) + min(0.0, document.wall - first.before)


def compared(documents: Iterable[Dated], first: Anchor, last: Anchor, limits: FitLimits) -> Finding:
    """The finding for the largest offset."""
    offsets = {document.node: least_offset(document, first, last) for document in documents}
    if not offsets:
        return Finding("run.clock", Status.SKIPPED, "no other node has published its time")
    return judged("run.clock", offsets, limits, "at least ")


def judged(name: str, offsets: dict[str, float], limits: FitLimits, prefix: str = "") -> Finding:
    """The finding for clock ``offsets`` (seconds ahead of ours, by node)."""
    node, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    text = f"agrees with {counted(len(offsets), 'other node')}, within the precision of this check"
    found = Finding(name, Status.OK, text, worst, "s", limits.clock_s)
    if abs(worst) <= limits.clock_s:
        return found
    side = "ahead of" if worst > 0 else "behind"
    return found.but(Status.WARN, _HINT, f"the clock of {node} is {prefix}{abs(worst):.3g} s {side} this node's")
