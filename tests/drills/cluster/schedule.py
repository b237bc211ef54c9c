"""A schedule of faults drawn by chance, which looks at nothing, so that different jobs meet the same one. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    WORKER_KILL = "worker-kill"
    NODE_KILL = "node-kill"
    JOIN = "join"
    DRAIN = "drain"
    OUTAGE = "etcd-outage"
    FREEZE = "node-freeze"
    FULL_DISK = "full-disk"
    CLOCK_JUMP = "clock-jump"


@dataclass(frozen=True, slots=True)
class Timed:
    """A blow ``at_s`` seconds after the beginning, which lasts ``lasts_s``.

    ``pick`` chooses the victim among the nodes that run then, in order of their start.
    """

    at_s: float
    blow: Blow
    pick: int
    lasts_s: float


STORM = {
    Blow.WORKER_KILL: 6.0,
    Blow.NODE_KILL: 2.0,
    Blow.FREEZE: 1.5,
    Blow.JOIN: 1.0,
    Blow.OUTAGE: 0.5,
    Blow.FULL_DISK: 0.5,
}
"""Of Llama 3's interruptions (arXiv:2407.21783, table 5) most ended processes (GPUs, their memory, software), some took
machines away (maintenance, power, chassis), some made them silent (network, NCCL's watchdog). The last three were none
there: they come seldom, but come."""
LASTS_S = {Blow.FREEZE: 8.0, Blow.OUTAGE: 4.0, Blow.FULL_DISK: 5.0}


def poisson(seed: int, length_s: float, count: int, weights: Mapping[Blow, float]) -> tuple[Timed, ...]:
    """``count`` blows of a Poisson process within ``length_s``, each of ``weights`` at least once if they suffice.

    Given their number, the moments of such a process are independent and equally likely anywhere.
    """
    chance = random.Random(seed)
    moments = sorted(chance.uniform(0.0, length_s) for _ in range(count))
    blows = [*weights, *chance.choices(list(weights), list(weights.values()), k=max(0, count - len(weights)))]
    chance.shuffle(blows)
    return tuple(
        Timed(at_s, blow, chance.randrange(1_000_000), LASTS_S.get(blow, 0.0))
        for at_s, blow in zip(moments, blows, strict=False)
    )
