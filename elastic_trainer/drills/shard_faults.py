"""The drills in which nodes are lost that hold only a part of a sharded model.

*Runs in* the main thread of the command or test. *Owns* nothing. *Fails by* DrillError.
*Invariant*: each leaves the stage as it found it: all its nodes train.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.drills.faults import Fault, FaultKind, Injected
from elastic_trainer.drills.measure import Effect, Recovery, Standing, recovery, worker_place
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.drills.strikes import aftermath, kill_nodes, restarted
from elastic_trainer.local.ledger import LineKind


def group_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a node of a group of two: the other group goes on, and a new node makes this one whole again."""
    before = stage.settled()
    place = len(before.nodes) - 1 - repeat % len(before.nodes)
    name, group = before.nodes[place], before.nodes[place - place % 2 : place - place % 2 + 2]
    t = kill_nodes(stage, [name])
    effect = aftermath(stage, before, f"node {name} of the group {' '.join(group)} killed", t, group)
    began = now()
    stage.restore()
    standing = stage.settled()
    survivors = {worker: pid for worker, pid in before.pids.items() if worker_place(worker)[0] != name}
    first = min(steps for node in group if (steps := stage.book.first_step(node, standing.round)) is not None)
    effect = replace(effect, steps_lost=stage.book.committed_again(survivors.values()))
    return effect.amended({"rejoin_s": first - began}, restarted(stage, survivors))


def reshard(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a node of a model that is sharded over all of them, which is sharded anew without it; then one joins.

    All workers start again each time. Steps behind the newest state that is left are repeated; lost are those that a
    checkpoint held.
    """
    before = stage.settled()
    saved = stage.until(lambda: _saved(stage), "a checkpoint")
    name = before.nodes[-1 - repeat % len(before.nodes)]
    killed = Injected(Fault(FaultKind.KILL_NODE, saved), name, (), kill_nodes(stage, [name]), before.round, saved)
    smaller = stage.settled()
    without = _recovered(stage, killed)
    t, joining = now(), stage.cluster.add().name
    joined = Injected(Fault(FaultKind.JOIN, without.step), joining, (), t, smaller.round, without.step)
    after = stage.settled()
    with_it = _recovered(stage, joined)
    return Effect(
        what=f"node {name} killed; {joining} joined",
        recovery_s=without.recovery_s,
        gap_s=without.pause_s,
        steps_lost=max(0, saved + 1 - without.step),
        details={
            "steps_repeated": float(without.steps_repeated),
            "rejoin_s": with_it.recovery_s,
            "repeated_by_join": float(with_it.steps_repeated),
        },
        problems=_sizes(before, smaller, after),
    )


def _saved(stage: Stage) -> int:
    """The step of the newest checkpoint; 0 without any."""
    stage.look()
    return max((line.step for line in stage.book.lines if line.event is LineKind.CHECKPOINT), default=0)


def _recovered(stage: Stage, injected: Injected) -> Recovery:
    found = recovery(injected, stage.book.lines)
    if found is None:
        raise DrillError(f"no step was made after: {injected}")
    return found


def _sizes(before: Standing, smaller: Standing, after: Standing) -> tuple[str, ...]:
    worlds = [each.world for each in (before, smaller, after)]
    expected = [before.world, before.world - 1, before.world]
    return () if worlds == expected else (f"the model was sharded over {worlds} ranks, not over {expected}",)
