"""The drills in which a network falls silent: they need the stage to be in networks of its own.

*Runs in* the main thread of the command or test. *Owns* nothing. *Fails by* DrillError.
"""

from __future__ import annotations

from elastic_trainer.clock import pause
from elastic_trainer.drills.measure import Effect
from elastic_trainer.drills.node_faults import back, broken_rounds
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.drills.strikes import aftermath
from elastic_trainer.local.hosts import Segment

HELD_S = 7.0
"""How long the node stays cut off once the others train on: until its lease has ended too, or it would end amid the
return."""


def node_partition(stage: Stage, repeat: int, segment: Segment) -> Effect:
    """Nothing passes to or from one node: the others go on; joined again, it comes back."""
    before = stage.settled()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    if not segment.reaches(name):
        raise DrillError(f"{name} cannot be reached before its network is cut")
    stage.retire(name)
    t = now()
    segment.cut(name)
    if segment.reaches(name):
        raise DrillError(f"{name} is still reached although its network was cut")
    effect = aftermath(stage, before, f"node {name} cut off", t, [name])
    pause(HELD_S)
    broken = broken_rounds(stage)
    mended = now()
    segment.restore(name)
    return back(stage, name, effect, mended, broken)


def pair_partition(stage: Stage, repeat: int, segment: Segment) -> Effect:
    """Nothing passes from one node to another, though both reach etcd and all others: one of the two is left out, the
    others go on; mended, it comes back."""
    before = stage.settled()
    one, other = before.nodes[repeat % len(before.nodes)], before.nodes[(repeat + 1) % len(before.nodes)]
    t = now()
    segment.part(one, other, one_way=True)
    name = stage.until(lambda: _left_out(stage, before.round), f"a round without {one} or {other}")
    stage.retire(name)
    effect = aftermath(stage, before, f"the way from {one} to {other} cut", t, [name])
    problems = list(effect.problems)
    if name not in (one, other):
        problems.append(f"{name} was left out, though all reached it")
    broken = broken_rounds(stage)
    mended = now()
    segment.reunite(one, other)
    return back(stage, name, effect.amended({}, problems), mended, broken)


def _left_out(stage: Stage, number: int) -> str | None:
    """Whom a round after ``number`` left out."""
    stage.look()
    return next((each.left_out for each in stage.history if each.number > number and each.left_out), None)
