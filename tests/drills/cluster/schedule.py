"""A schedule of faults drawn by chance: what comes next, whom it strikes, how long until then. Pure.

:func:`draw` looks at the job before each fault: the same seed draws the same from the same situations, and what the job
cannot be asked to survive is never drawn: one living worker that holds the training state is always left.
:func:`poisson` looks at nothing, so that different jobs meet one schedule.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    """What may happen."""

    WORKER_KILL = "worker-kill"
    NODE_KILL = "node-kill"
    JOIN = "join"
    DRAIN = "drain"
    OUTAGE = "etcd-outage"
    FREEZE = "node-freeze"
    FULL_DISK = "full-disk"
    CLOCK_JUMP = "clock-jump"


@dataclass(frozen=True, slots=True)
class Situation:
    """``running`` nodes were not killed, frozen or asked to go; the workers of ``holders`` hold the training state."""

    running: tuple[str, ...]
    holders: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    etcd_answers: bool = True
    frozen: int = 0
    clocks_move: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """The next blow, ``wait_s`` seconds from now, or from when all is repaired (``after_repair``).

    ``seconds`` is the length of an outage or a freeze, and where a clock jumps to from the right time.
    """

    blow: Blow
    node: str | None
    wait_s: float
    after_repair: bool = False
    seconds: float = 0.0


_WEIGHTS = {
    Blow.WORKER_KILL: 5.0,
    Blow.NODE_KILL: 2.0,
    Blow.JOIN: 2.0,
    Blow.DRAIN: 1.0,
    Blow.OUTAGE: 1.0,
    Blow.FREEZE: 1.0,
    Blow.CLOCK_JUMP: 1.0,
}
_WAITS_S = ((0.0, 0.1), (0.1, 1.0))
"""Into the recovery from the blow before, and behind it."""
_REPAIRED = 0.4
"""How often the blow before is allowed to be repaired whole."""
_SEASONED = 0.8
"""How often a node that holds the state is struck, rather than one that starts."""
_SECONDS = {Blow.OUTAGE: (0.2, 2.0), Blow.FREEZE: (0.2, 6.0), Blow.CLOCK_JUMP: (-7200.0, 7200.0)}


def victims(blow: Blow, situation: Situation) -> tuple[str, ...]:
    """The nodes that ``blow`` may strike now."""
    if blow in (Blow.JOIN, Blow.OUTAGE):
        return ()
    if blow is Blow.CLOCK_JUMP:
        return situation.running if situation.clocks_move else ()
    others_hold = [name for name in situation.running if set(situation.holders) - {name}]
    return tuple(sorted(others_hold))


def possible(situation: Situation) -> tuple[Blow, ...]:
    """What may happen now."""
    striking = (Blow.WORKER_KILL, Blow.NODE_KILL, Blow.DRAIN, Blow.CLOCK_JUMP)
    found = [blow for blow in striking if victims(blow, situation)]
    if not situation.frozen and victims(Blow.FREEZE, situation):
        found.append(Blow.FREEZE)
    if len(situation.running) + situation.frozen < situation.max_nodes:
        found.append(Blow.JOIN)
    if situation.etcd_answers:
        found.append(Blow.OUTAGE)
    return tuple(found)


def draw(chance: random.Random, situation: Situation) -> Planned | None:
    """The next blow; None when nothing may happen now. A node joins first where there are too few."""
    wait_s, after_repair = chance.uniform(*chance.choice(_WAITS_S)), chance.random() < _REPAIRED
    if len(situation.running) < situation.min_nodes:
        return Planned(Blow.JOIN, None, wait_s)
    blows = possible(situation)
    if not blows:
        return None
    blow = chance.choices(blows, [_WEIGHTS[each] for each in blows])[0]
    seconds = chance.uniform(*_SECONDS[blow]) if blow in _SECONDS else 0.0
    return Planned(blow, _victim(chance, blow, situation), wait_s, after_repair, seconds)


def _victim(chance: random.Random, blow: Blow, situation: Situation) -> str | None:
    struck = victims(blow, situation)
    seasoned = [name for name in struck if name in situation.holders]
    if seasoned and chance.random() < _SEASONED:
        return chance.choice(seasoned)
    return chance.choice(struck) if struck else None


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
