"""Make ledger lines as a job would write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic_trainer.drills.faults import Fault, FaultKind, Injected
from elastic_trainer.local.ledger import Line, LineKind


def opened(round_: int, t: float, *, step: int = 0, world: int = 2, rank: int = 0, node: str = "n0") -> Line:
    return Line(event=LineKind.OPENED, t=t, node=node, rank=rank, world=world, round=round_, step=step)


def committed(
    step: int, round_: int = 1, t: float = 0.0, *, samples: Sequence[int] = (), of: int | None = None, **more: Any
) -> Line:
    """A rank has committed ``step``; ``of`` is the size of the global batch (default: all of it is this rank's)."""
    size = len(samples) if of is None else of
    values: dict[str, Any] = {"node": "n0", "samples": tuple(samples), "global_samples": size} | more
    return Line(event=LineKind.STEP, t=t, round=round_, step=step, **values)


def epochs(size: int, batch: int, count: int = 1) -> list[list[tuple[int, tuple[int, ...]]]]:
    """For each step of ``count`` epochs its (epoch, samples); the last batch of an epoch may be smaller."""
    order = range(size)
    return [[(epoch, tuple(order[begin : begin + batch])) for begin in range(0, size, batch)] for epoch in range(count)]


def struck(
    kind: FaultKind = FaultKind.KILL_NODE, *, node: str = "n1", t: float = 0.0, round_: int = 1, step: int = 0
) -> Injected:
    return Injected(Fault(kind, step, node), node, (4711,), t, round_, step)
