"""Strike the nodes of a stage, prove that it happened, and measure what it did to the survivors.

*Runs in* the main thread of the command or test. *Owns* nothing.
*Fails by* DrillError when a fault did not really happen, or no survivor went on.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

import psutil

from elastic_trainer.drills.measure import Effect, Standing, worker_place
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import KILL_LIMIT_S, kill


def worker(stage: Stage, standing: Standing, name: str) -> psutil.Process:
    """The worker ``name``: the very process that trains."""
    found = stage.worker(name)
    if found is None or found.pid != standing.pids.get(name):
        raise DrillError(f"the worker of {name} is not the process that trains (pid {standing.pids.get(name)})")
    return found


def kill_nodes(stage: Stage, names: Sequence[str]) -> float:
    """SIGKILL torchrun and workers of all ``names`` at once; when. All are gone at the return."""
    absent = [name for name in names if not stage.node(name).running]
    if absent:
        raise DrillError(f"{' '.join(absent)} did not run any more")
    families = [process for name in names for process in stage.node(name).family()]
    for name in names:
        stage.retire(name)
    return kill(families).t


def freeze(stage: Stage, victims: Sequence[psutil.Process]) -> float:
    """SIGSTOP all of ``victims`` at once; when. All that live stand still at the return."""
    t = now()
    processes.send(victims, signal.SIGSTOP)
    stage.until(lambda: all(processes.stands_still(each) for each in victims), "a freeze", KILL_LIMIT_S)
    return t


def aftermath(
    stage: Stage,
    before: Standing,
    what: str,
    t: float,
    victims: Sequence[str] = (),
    *,
    later: bool = True,
) -> Effect:
    """Wait until the survivors step again, in a ``later`` round or in any; what that cost them."""
    survivors = {name: pid for name, pid in before.pids.items() if worker_place(name)[0] not in victims}
    round_ = before.round + 1 if later else 0
    resumed = stage.resumed(survivors.values(), t, round_, f"a step of {' '.join(survivors)} after: {what}")
    return Effect(
        what=what,
        recovery_s=resumed - t,
        gap_s=stage.book.gap(survivors.values(), t, resumed),
        steps_lost=stage.book.committed_again(survivors.values()),
        problems=tuple(restarted(stage, survivors)),
    )


def restarted(stage: Stage, survivors: Mapping[str, int]) -> list[str]:
    """Which of the survivors do not train in the same process any more."""
    problems = []
    for name, pid in survivors.items():
        found = stage.worker(name)
        if found is None or found.pid != pid:
            problems.append(f"the worker of {name}, a survivor, was restarted")
    return problems
