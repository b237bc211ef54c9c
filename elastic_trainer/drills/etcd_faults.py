"""The drills in which etcd is lost: training goes on, and what fails meanwhile recovers when etcd is back.

*Runs in* the main thread of the command or test. *Owns* nothing. *Fails by* DrillError.
"""

from __future__ import annotations

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.measure import Effect, Standing
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.drills.strikes import aftermath, restarted, worker
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.local.cluster import kill

HELD_S = 1.5
"""How long etcd stays away once a worker has been killed without it."""


def etcd_outage(stage: Stage, repeat: int, seconds: float) -> Effect:
    """No etcd for a while: no step is lost and nothing restarts; a worker killed meanwhile recovers when it is back.

    The gap is that of the undisturbed outage; recovery counts from etcd's return.
    """
    before = stage.settled()
    gap_s, steps = _undisturbed(stage, before, seconds)
    pause(0.5)  # clients are connected again
    standing = stage.settled()
    problems = restarted(stage, before.pids)
    if standing.round != before.round:
        problems.append(f"an outage in which nothing failed led from round {before.round} to {standing.round}")
    effect = _worker_lost_meanwhile(stage, standing, repeat)
    lost = stage.book.committed_again(before.pids.values())
    return Effect(
        what=f"etcd killed for {seconds:g} s; again, and {effect.what}",
        recovery_s=effect.recovery_s,
        gap_s=gap_s,
        steps_lost=max(effect.steps_lost, lost),
        details={"outage_s": seconds, "steps_during_outage": float(steps), **effect.details},
        problems=(*problems, *effect.problems),
    )


def _undisturbed(stage: Stage, before: Standing, seconds: float) -> tuple[float, int]:
    """An outage of ``seconds``; the longest gap between steps in it, and how many steps were committed."""
    stage.server.kill()
    t, deadline = now(), Deadline.after(seconds)
    while not deadline.expired:
        if stage.server.is_healthy():
            raise DrillError("etcd answers although it was killed")
        stage.until(lambda: True, "")
        pause(min(0.2, deadline.remaining_s()))
    stage.look()
    end = now()
    pids = list(before.pids.values())
    steps = min(len(stage.book.steps_after(pid, t)) for pid in pids)
    if not steps:
        raise DrillError(f"no step was committed while etcd was away: {stage.describe()}")
    stage.server.restart()
    stage.resumed(pids, now(), 0, "a step after the outage")
    return stage.book.gap(pids, t, end), steps


def _worker_lost_meanwhile(stage: Stage, before: Standing, repeat: int) -> Effect:
    """Kill a worker while etcd is away; how soon the others go on when it is back."""
    name = before.nodes[-1 - repeat % len(before.nodes)]
    victim = worker(stage, before, name)
    stage.server.kill()
    kill([victim])
    pause(HELD_S)
    if stage.server.is_healthy():
        raise DrillError("etcd answers although it was killed")
    stage.server.launch()
    stage.server.wait_healthy(Deadline.after(stage.setting.limit_s))
    effect = aftermath(stage, before, f"worker of {name} killed meanwhile", now(), [name])
    stage.restore()
    return effect


def etcd_leader_loss(stage: Stage, repeat: int) -> Effect:
    """The leader of three etcd servers is killed: nothing happens to the job. A worker killed before there is a new
    leader recovers with it; recovery counts from that worker's death."""
    before = stage.settled()
    first, elected_s, t = _depose(stage)
    calm = aftermath(stage, before, f"etcd's leader m{first} killed", t, later=False)
    standing = stage.settled()
    problems = list(calm.problems)
    if standing.round != before.round:
        problems.append(f"the loss of etcd's leader led from round {before.round} to {standing.round}")
    stage.servers.restart(first)

    name = standing.nodes[-1 - repeat % len(standing.nodes)]
    victim = worker(stage, standing, name)
    second = _leader(stage)
    stage.servers.kill(second)
    t = kill([victim]).t
    what = f"{calm.what}; again m{second}, and the worker of {name}"
    effect = aftermath(stage, standing, what, t, [name])
    stage.servers.restart(second)
    stage.restore()
    return Effect(
        what=what,
        recovery_s=effect.recovery_s,
        gap_s=calm.gap_s,
        steps_lost=max(effect.steps_lost, calm.steps_lost),
        details={"elected_s": elected_s},
        problems=(*problems, *effect.problems),
    )


def _depose(stage: Stage) -> tuple[int, float, float]:
    """Kill the leader and wait for another: which it was, how long that took, and when it was killed."""
    first = _leader(stage)
    t = now()
    stage.servers.kill(first)
    second = stage.until(lambda: _leads(stage, first), "a new leader of etcd")
    if second - 1 == first:
        raise DrillError("etcd's leader did not change")
    return first, now() - t, t


def _leader(stage: Stage) -> int:
    """Its index; a machine that stands still for a second may be between two of them."""
    found: int = stage.until(lambda: _leads(stage, but=-1), "a leader of etcd")
    return found - 1


def _leads(stage: Stage, but: int) -> int | None:
    """One more than the index of the leader, if it is not ``but``."""
    try:
        index = stage.servers.leader()
    except StoreUnavailableError:
        return None
    return index + 1 if index != but else None
