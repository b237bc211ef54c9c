"""How long the job stood still after a fault, and what it did twice. Pure.

Times are monotonic seconds of one host, from the ledger and from the fault itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.drills.user_job.faults import FaultKind, Injected
from elastic_trainer.local.ledger import Line, LineKind, lineage


@dataclass(frozen=True, slots=True)
class Recovery:
    """The first step after a fault in a later round. ``steps_repeated`` were committed before and thrown away."""

    recovery_s: float
    """From the fault to that step."""
    pause_s: float
    """From the last step of the earlier rounds to that step: what the surviving members stood still."""
    round: int
    step: int
    steps_repeated: int
    world: int


def recovery(injected: Injected, lines: Sequence[Line]) -> Recovery | None:
    """The recovery from ``injected`` as far as ``lines`` tell; None while there is none."""
    steps = [line for line in lines if line.event is LineKind.STEP]
    round_ = max((line.round for line in steps if line.t <= injected.t), default=injected.round)
    answers = _answers(injected, lines)
    later = [line for line in steps if line.t > injected.t and line.round > round_ and line.round in answers]
    if not later:
        return None
    first = min(later, key=lambda line: line.t)
    earlier = [line for line in steps if line.round < first.round]
    reached = lineage(earlier)[-1].step if earlier else first.step - 1
    return Recovery(
        recovery_s=first.t - injected.t,
        pause_s=first.t - max((line.t for line in earlier), default=injected.t),
        round=first.round,
        step=first.step,
        steps_repeated=max(0, reached - first.step + 1),
        world=first.world,
    )


def _answers(injected: Injected, lines: Sequence[Line]) -> set[int]:
    """The rounds that may be an answer to this fault: to a join only those that have the newcomer."""
    joined = injected.fault.kind is FaultKind.JOIN
    return {line.round for line in lines if not joined or line.node == injected.node}
