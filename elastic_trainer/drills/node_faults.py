"""The drills in which workers and nodes are lost, leave and come.

Each function strikes once, measures, and leaves the stage as it found it: all its nodes train.
*Runs in* the main thread of the command or test. *Owns* nothing. *Fails by* DrillError.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

import psutil

from elastic_trainer.clock import pause
from elastic_trainer.drills.measure import Effect, Standing
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.drills.strikes import aftermath, freeze, kill_nodes, restarted, worker
from elastic_trainer.drills.wedge import STUCK, Wedge, ask
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import kill
from elastic_trainer.membership.documents import RoundState

MOST_APART_S = 0.05
_TRIES = 3


def worker_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL the worker of each rank in turn."""
    before = stage.settled()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    t = kill([worker(stage, before, name)]).t
    rank = before.nodes.index(name) * stage.setting.workers
    effect = aftermath(stage, before, f"worker of {name} (rank {rank}) killed", t, [name])
    stage.restore()
    return effect


def worker_freeze(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP the worker of a node whose agent lives on: the others go on; thawed, the same process comes back."""
    effect, name, victim = _freeze_worker(stage, repeat)
    thawed = now()
    processes.send([victim], signal.SIGCONT)
    standing = stage.settled()
    problems = list(effect.problems)
    if standing.pids[name] != victim.pid:
        problems.append(f"the worker of {name} was thawed, and restarted")
    first = stage.book.first_step(name, standing.round)
    return effect.amended({"rejoin_s": first - thawed} if first is not None else {}, problems)


def worker_hang(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP a worker for good: its agent ends it in time, and another process takes its place."""
    effect, _, _ = _freeze_worker(stage, repeat)
    stage.restore()
    return effect


def _freeze_worker(stage: Stage, repeat: int) -> tuple[Effect, str, psutil.Process]:
    """Freeze the worker of each rank in turn: what that did to the others, its node, its process."""
    before = stage.settled()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    victim = worker(stage, before, name)
    t = freeze(stage, [victim])
    return aftermath(stage, before, f"worker of {name} frozen", t, [name]), name, victim


def worker_wedge(stage: Stage, repeat: int) -> Effect:
    """Let a worker get stuck in one way after the other while its process lives: its agent finds out, and ends it.

    Where all ranks are made to wait for each other nobody is to blame; they meet anew, and no process ends.
    """
    kind = STUCK[repeat % len(STUCK)]
    before = stage.settled()
    name = before.nodes[-1]
    file, t = ask(stage.directory, name, kind), now()
    stage.until(lambda: not file.exists(), f"{name} to be stuck in {kind}")
    struck = [name] if kind is not Wedge.COLLECTIVE else []
    effect = aftermath(stage, before, f"worker of {name} stuck ({kind})", t, struck)
    stage.restore()
    return effect


def node_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL agent and worker of a node that does not host rank 0."""
    before = stage.settled()
    return _lose(stage, [before.nodes[1 + repeat % (len(before.nodes) - 1)]])


def rank0_node_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL the node that hosts rank 0 and the store at which the ranks meet."""
    return _lose(stage, [stage.settled().nodes[0]])


def double_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL two nodes at once, rank 0's among them every other time."""
    nodes = stage.settled().nodes
    return _lose(stage, [nodes[0], nodes[-1]] if repeat % 2 else [nodes[1], nodes[2]])


def _lose(stage: Stage, names: list[str]) -> Effect:
    before = stage.settled()
    t = kill_nodes(stage, names)
    what = f"node{'s' * (len(names) > 1)} {' and '.join(names)} killed"
    effect = aftermath(stage, before, what, t, names)
    stage.restore()
    return effect


def node_freeze(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP a whole node: the others go on; thawed, it comes back by a planned change."""
    before = stage.settled()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    stage.retire(name)
    t = freeze(stage, stage.node(name).family())
    effect = aftermath(stage, before, f"node {name} frozen", t, [name])
    broken = broken_rounds(stage)
    thawed = now()
    stage.node(name).thaw()
    return back(stage, name, effect, thawed, broken)


def back(stage: Stage, name: str, effect: Effect, since: float, before: Mapping[int, str]) -> Effect:
    """Wait for the return of ``name``; it must not break a round (those of ``before`` were so before)."""
    stage.welcome(name)
    standing = stage.settled()
    problems = list(effect.problems)
    problems += _broken_since(stage, before, f"the return of {name}")
    first = stage.book.first_step(name, standing.round)
    return effect.amended({"rejoin_s": first - since} if first is not None else {}, problems)


def _broken_since(stage: Stage, before: Mapping[int, str], what: str) -> list[str]:
    found = broken_rounds(stage)
    return [f"{what} broke a round: {reason}" for number, reason in found.items() if number not in before]


def broken_rounds(stage: Stage) -> dict[int, str]:
    """The rounds that have been broken so far, and why."""
    if (standing := stage.look()) is not None:  # the news of it may be on its way, and of all before it
        number = standing.round
        stage.until(lambda: (known := stage.document) is not None and known.number >= number, "the news of a round")
    return {document.number: document.reason for document in stage.history if document.state is RoundState.BROKEN}


def node_join(stage: Stage, repeat: int) -> Effect:
    """One more node comes while the others train; it leaves again afterwards. Recovery counts from its start."""
    before = stage.settled()
    t = now()
    name = stage.cluster.add().name
    joined = stage.settled(5)
    if name not in joined.nodes:
        raise DrillError(f"{name} did not join")
    effect = aftermath(stage, before, f"node {name} joined", t)
    _leave(stage, name)
    return effect.amended({}, [*effect.problems, *restarted(stage, before.pids)])


def node_drain(stage: Stage, repeat: int) -> Effect:
    """SIGTERM to a node: it leaves by a planned change, with exit code 143."""
    before = stage.settled()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    broken = broken_rounds(stage)
    t = now()
    stage.retire(name)
    stage.node(name).terminate()
    effect = aftermath(stage, before, f"node {name} drained", t, [name])
    left_s = _gone(stage, name) - t
    problems = [*effect.problems, *_broken_since(stage, broken, f"the departure of {name}")]
    stage.restore()
    return effect.amended({"left_s": left_s}, problems)


def _leave(stage: Stage, name: str) -> None:
    stage.retire(name)
    stage.node(name).terminate()
    _gone(stage, name)
    stage.settled()


def _gone(stage: Stage, name: str) -> float:
    """Wait until node ``name`` has ended, as an evicted one does; when."""
    stage.until(lambda: not stage.node(name).running, f"the end of {name}")
    code = stage.node(name).exit_code()
    if code != EXIT_LEFT:
        raise DrillError(f"{name} was asked to leave and exited with {code}, not {EXIT_LEFT}")
    return now()


def kill_during_recovery(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a second worker while the loss of a first is dealt with, each time a little later."""
    before = stage.settled()
    apart_s = MOST_APART_S * (repeat % 6) / 5
    names = [before.nodes[-1], before.nodes[1]] if repeat % 2 else [before.nodes[1], before.nodes[0]]
    first, second = (worker(stage, before, name) for name in names)
    t = now()
    processes.send([first], signal.SIGKILL)
    pause(apart_s)
    kill([first, second])
    what = f"workers of {names[0]} and, {apart_s * 1000:.0f} ms later, {names[1]} killed"
    effect = aftermath(stage, before, what, t, names)
    stage.restore()
    return effect


def kill_during_join(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a worker in the moment in which a planned change begins: of a member, or of the newcomer."""
    newcomer, before = _one_less(stage)
    name = newcomer if repeat % 2 else before.nodes[0]
    member = worker(stage, before, before.nodes[0])
    stage.until(lambda: _draining(stage, before.round), "a planned change")
    found = stage.node(newcomer).worker() if name == newcomer else member
    if found is None:
        raise DrillError(f"{newcomer} has no worker")
    t = kill([found]).t
    who = "the newcomer" if name == newcomer else "a member"
    effect = aftermath(stage, before, f"worker of {name}, {who}, killed while {newcomer} joined", t, [name])
    stage.restore()
    return effect


def _one_less(stage: Stage) -> tuple[str, Standing]:
    """Kill the last rank's worker, which will come back by a planned change; its node, and who trains without it."""
    for _ in range(_TRIES):
        first = stage.settled()
        name = first.nodes[-1]
        t = kill([worker(stage, first, name)]).t
        others = [pid for node, pid in first.pids.items() if node != name]
        stage.resumed(others, t, first.round + 1, f"a step without {name}")
        before = stage.look()
        if before is not None and name not in before.nodes:
            return name, before
    raise DrillError("a killed worker was back before the others had gone on without it")


def _draining(stage: Stage, number: int) -> bool:
    stage.look()
    return any(each.state is RoundState.DRAINING and each.number >= number for each in stage.history)
