"""The drill in which a node's network falls silent: needs the stage to be in networks of its own.

*Runs in* the main thread of the command or test. *Owns* nothing. *Fails by* DrillError.
"""

from __future__ import annotations

from elastic_trainer.clock import pause
from elastic_trainer.sim.drill_measure import Effect
from elastic_trainer.sim.drill_nodes import back, broken_rounds
from elastic_trainer.sim.drill_stage import DrillError, Stage, now
from elastic_trainer.sim.drill_strikes import aftermath
from elastic_trainer.sim.namespaces import Segment

HELD_S = 1.0
"""How long the node stays cut off once the others train on."""


def node_partition(stage: Stage, repeat: int, segment: Segment) -> Effect:
    """Nothing passes to or from one node: its lease ends and the others go on; joined again, it comes back."""
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
