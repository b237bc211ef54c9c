"""The drills: each strikes a stage once, proves that the fault happened, and measures what it did to the survivors.

Workers and nodes are killed, frozen, stuck, drained or joined; networks cut; etcd lost; shards lost; the machine kept
busy. Some leave nodes to be started again, see :meth:`elastic_trainer.drills.run.Drill.play`.

*Runs in* the main thread of the command or test. *Owns* the processes that keep the machine busy.
*Fails by* DrillError when a fault did not really happen, or no survivor went on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import psutil

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.faults import Fault, FaultKind, Injected
from elastic_trainer.drills.job import STUCK, Wedge, ask
from elastic_trainer.drills.measure import Effect, Recovery, Standing, recovery, split_worker
from elastic_trainer.drills.stage import DrillError, Stage, now
from elastic_trainer.errors import EXIT_LEFT, StoreUnavailableError
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import KILL_LIMIT_S, kill
from elastic_trainer.local.ledger import LineKind
from elastic_trainer.membership.documents import RoundState


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
    stage: Stage, before: Standing, what: str, t: float, victims: Sequence[str] = (), *, later: bool = True
) -> Effect:
    """Wait until the survivors step again, in a ``later`` round or in any; what that cost them."""
    survivors = {name: pid for name, pid in before.pids.items() if split_worker(name)[0] not in victims}
    round_ = before.round + 1 if later else 0
    resumed = stage.await_resumed(survivors.values(), t, round_, f"a step of {' '.join(survivors)} after: {what}")
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


# ---- workers and nodes

MOST_APART_S = 0.05
_TRIES = 3


def worker_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL the worker of each rank in turn."""
    before = stage.await_steps()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    t = kill([worker(stage, before, name)]).t
    rank = before.nodes.index(name) * stage.setting.workers
    return aftermath(stage, before, f"worker of {name} (rank {rank}) killed", t, [name])


def worker_freeze(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP the worker of a node whose agent lives on: the others go on; thawed, the same process comes back."""
    effect, name, victim = _freeze_worker(stage, repeat)
    thawed = now()
    processes.send([victim], signal.SIGCONT)
    standing = stage.await_steps()
    problems = list(effect.problems)
    if standing.pids[name] != victim.pid:
        problems.append(f"the worker of {name} was thawed, and restarted")
    first = stage.book.first_step(name, standing.round)
    return effect.amended({"rejoin_s": first - thawed} if first is not None else {}, problems)


def worker_hang(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP a worker for good: its agent ends it in time, and another process takes its place."""
    return _freeze_worker(stage, repeat)[0]


def _freeze_worker(stage: Stage, repeat: int) -> tuple[Effect, str, psutil.Process]:
    """Freeze the worker of each rank in turn: what that did to the others, its node, its process."""
    before = stage.await_steps()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    victim = worker(stage, before, name)
    t = freeze(stage, [victim])
    return aftermath(stage, before, f"worker of {name} frozen", t, [name]), name, victim


def worker_wedge(stage: Stage, repeat: int) -> Effect:
    """Let a worker get stuck in one way after the other while its process lives: its agent finds out, and ends it.

    Where all ranks are made to wait for each other nobody is to blame; they meet anew, and no process ends.
    """
    kind = STUCK[repeat % len(STUCK)]
    before = stage.await_steps()
    name = before.nodes[-1]
    file, t = ask(stage.directory, name, kind), now()
    stage.until(lambda: not file.exists(), f"{name} to be stuck in {kind}")
    struck = [name] if kind is not Wedge.COLLECTIVE else []
    return aftermath(stage, before, f"worker of {name} stuck ({kind})", t, struck)


def node_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL agent and worker of a node that does not host rank 0."""
    before = stage.await_steps()
    return _lose(stage, [before.nodes[1 + repeat % (len(before.nodes) - 1)]])


def rank0_node_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL the node that hosts rank 0 and the store at which the ranks meet."""
    return _lose(stage, [stage.await_steps().nodes[0]])


def double_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL two nodes at once, rank 0's among them every other time."""
    nodes = stage.await_steps().nodes
    return _lose(stage, [nodes[0], nodes[-1]] if repeat % 2 else [nodes[1], nodes[2]])


def _lose(stage: Stage, names: list[str]) -> Effect:
    before = stage.await_steps()
    t = kill_nodes(stage, names)
    what = f"node{'s' * (len(names) > 1)} {' and '.join(names)} killed"
    return aftermath(stage, before, what, t, names)


def node_freeze(stage: Stage, repeat: int) -> Effect:
    """SIGSTOP a whole node: the others go on; thawed, it comes back by a planned change."""
    before = stage.await_steps()
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
    standing = stage.await_steps()
    problems = list(effect.problems)
    problems += _broken_since(stage, before, f"the return of {name}")
    first = stage.book.first_step(name, standing.round)
    return effect.amended({"rejoin_s": first - since} if first is not None else {}, problems)


def _broken_since(stage: Stage, before: Mapping[int, str], what: str) -> list[str]:
    found = broken_rounds(stage)
    return [f"{what} broke a round: {reason}" for number, reason in found.items() if number not in before]


def broken_rounds(stage: Stage) -> dict[int, str]:
    """The rounds that have been broken so far, and why."""
    if (standing := stage.observe()) is not None:  # the news of it may be on its way, and of all before it
        number = standing.round
        stage.until(lambda: (known := stage.document) is not None and known.number >= number, "the news of a round")
    return {document.number: document.reason for document in stage.history if document.state is RoundState.BROKEN}


def node_join(stage: Stage, repeat: int) -> Effect:
    """One more node comes while the others train; it leaves again afterwards. Recovery counts from its start."""
    before = stage.await_steps()
    t = now()
    name = stage.cluster.add().name
    joined = stage.await_steps(5)
    if name not in joined.nodes:
        raise DrillError(f"{name} did not join")
    effect = aftermath(stage, before, f"node {name} joined", t)
    stage.retire(name)
    stage.node(name).terminate()
    _gone(stage, name)
    stage.await_steps()
    return effect.amended({}, [*effect.problems, *restarted(stage, before.pids)])


def node_drain(stage: Stage, repeat: int) -> Effect:
    """SIGTERM to a node: it leaves by a planned change, with exit code 143."""
    before = stage.await_steps()
    name = before.nodes[-1 - repeat % len(before.nodes)]
    broken = broken_rounds(stage)
    t = now()
    stage.retire(name)
    stage.node(name).terminate()
    effect = aftermath(stage, before, f"node {name} drained", t, [name])
    left_s = _gone(stage, name) - t
    problems = [*effect.problems, *_broken_since(stage, broken, f"the departure of {name}")]
    return effect.amended({"left_s": left_s}, problems)


def _gone(stage: Stage, name: str) -> float:
    """Wait until node ``name`` has ended, as an evicted one does; when."""
    stage.until(lambda: not stage.node(name).running, f"the end of {name}")
    code = stage.node(name).exit_code()
    if code != EXIT_LEFT:
        raise DrillError(f"{name} was asked to leave and exited with {code}, not {EXIT_LEFT}")
    return now()


def kill_during_recovery(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a second worker while the loss of a first is dealt with, each time a little later."""
    before = stage.await_steps()
    apart_s = MOST_APART_S * (repeat % 6) / 5
    names = [before.nodes[-1], before.nodes[1]] if repeat % 2 else [before.nodes[1], before.nodes[0]]
    first, second = (worker(stage, before, name) for name in names)
    t = now()
    processes.send([first], signal.SIGKILL)
    pause(apart_s)
    kill([first, second])
    what = f"workers of {names[0]} and, {apart_s * 1000:.0f} ms later, {names[1]} killed"
    return aftermath(stage, before, what, t, names)


def kill_during_join(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a worker in the moment in which a planned change begins: of a member, or of the newcomer."""
    newcomer, before = _one_less(stage)
    name = newcomer if repeat % 2 else before.nodes[0]
    member = worker(stage, before, before.nodes[0])
    stage.until(
        lambda: any(each.state is RoundState.DRAINING and each.number >= before.round for each in stage.documents()),
        "a planned change",
    )
    found = stage.node(newcomer).worker() if name == newcomer else member
    if found is None:
        raise DrillError(f"{newcomer} has no worker")
    t = kill([found]).t
    who = "the newcomer" if name == newcomer else "a member"
    return aftermath(stage, before, f"worker of {name}, {who}, killed while {newcomer} joined", t, [name])


def _one_less(stage: Stage) -> tuple[str, Standing]:
    """Kill the last rank's worker, which will come back by a planned change; its node, and who trains without it."""
    for _ in range(_TRIES):
        first = stage.await_steps()
        name = first.nodes[-1]
        t = kill([worker(stage, first, name)]).t
        others = [pid for node, pid in first.pids.items() if node != name]
        stage.await_resumed(others, t, first.round + 1, f"a step without {name}")
        before = stage.observe()
        if before is not None and name not in before.nodes:
            return name, before
    raise DrillError("a killed worker was back before the others had gone on without it")


# ---- networks

HELD_S = 7.0
"""How long the node stays cut off once the others train on: until its lease has ended too, or it would end amid the
return."""


def node_partition(stage: Stage, repeat: int) -> Effect:
    """Nothing passes to or from one node: the others go on; joined again, it comes back."""
    before, segment = stage.await_steps(), stage.segment
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


def pair_partition(stage: Stage, repeat: int) -> Effect:
    """Nothing passes from one node to another, though both reach etcd and all others: one of the two is left out, the
    others go on; mended, it comes back."""
    before, segment = stage.await_steps(), stage.segment
    one, other = before.nodes[repeat % len(before.nodes)], before.nodes[(repeat + 1) % len(before.nodes)]
    t = now()
    segment.part(one, other)
    left_out = stage.until(
        lambda: [each.left_out for each in stage.documents() if each.number > before.round and each.left_out],
        f"a round without {one} or {other}",
    )
    name: str = left_out[0]
    stage.retire(name)
    effect = aftermath(stage, before, f"the way from {one} to {other} cut", t, [name])
    problems = list(effect.problems)
    if name not in (one, other):
        problems.append(f"{name} was left out, though all reached it")
    broken = broken_rounds(stage)
    mended = now()
    segment.reunite(one, other)
    return back(stage, name, effect.amended({}, problems), mended, broken)


# ---- a busy machine

LOOPS = 8
_LOOP = "while True: pass"


def busy_machine(stage: Stage, repeat: int) -> Effect:
    """Loops keep the machine busy for a while: a suspicion that is wrong costs the step at hand, and no more.

    Recovery is how long all ranks needed for their next step once the loops had ended.
    """
    before = stage.await_steps()
    broken, begun = len(broken_rounds(stage)), now()
    tied = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid()), "0"]
    with ExitStack() as stack:
        for _ in range(LOOPS):
            loop = subprocess.Popen([*tied, sys.executable, "-c", _LOOP], stdin=subprocess.DEVNULL)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        _let_pass(stage)
    ended = now()
    standing = stage.await_steps()
    pids = list(before.pids.values())
    return Effect(
        what=f"{LOOPS} busy loops for {stage.setting.outage_s:g} s",
        recovery_s=stage.await_resumed(pids, ended, 0, "a step of all") - ended,
        gap_s=stage.book.gap(pids, begun, ended),
        steps_lost=stage.book.committed_again(pids),
        details={
            "rounds_broken": float(len(broken_rounds(stage)) - broken),
            "steps": float(min(len(stage.book.steps_after(pid, begun)) for pid in standing.pids.values())),
        },
        problems=tuple(restarted(stage, before.pids)),
    )


def _let_pass(stage: Stage) -> None:
    """Wait as long as an outage or a load lasts."""
    deadline = Deadline.after(stage.setting.outage_s)
    while not deadline.expired:
        stage.until(lambda: True, "")  # a signal ends it
        pause(min(0.2, deadline.remaining_s()))


# ---- etcd

LEFT_S = 1.5
"""How long etcd stays away once a worker has been killed without it."""


def etcd_outage(stage: Stage, repeat: int) -> Effect:
    """No etcd for a while: no step is lost and nothing restarts; a worker killed meanwhile recovers when it is back.

    The gap is that of the undisturbed outage; recovery counts from etcd's return.
    """
    before = stage.await_steps()
    gap_s, steps = _undisturbed(stage, before)
    pause(0.5)  # clients are connected again
    standing = stage.await_steps()
    problems = restarted(stage, before.pids)
    if standing.round != before.round:
        problems.append(f"an outage in which nothing failed led from round {before.round} to {standing.round}")
    effect = _worker_lost_meanwhile(stage, standing, repeat)
    lost = stage.book.committed_again(before.pids.values())
    return Effect(
        what=f"etcd killed for {stage.setting.outage_s:g} s; again, and {effect.what}",
        recovery_s=effect.recovery_s,
        gap_s=gap_s,
        steps_lost=max(effect.steps_lost, lost),
        details={"outage_s": stage.setting.outage_s, "steps_during_outage": float(steps), **effect.details},
        problems=(*problems, *effect.problems),
    )


def _undisturbed(stage: Stage, before: Standing) -> tuple[float, int]:
    """An outage; the longest gap between steps in it, and how many steps were committed."""
    stage.server.kill()
    t = now()
    _let_pass(stage)
    if stage.server.is_healthy():
        raise DrillError("etcd answers although it was killed")
    stage.observe()
    end = now()
    pids = list(before.pids.values())
    steps = min(len(stage.book.steps_after(pid, t)) for pid in pids)
    if not steps:
        raise DrillError(f"no step was committed while etcd was away: {stage.describe()}")
    stage.server.restart()
    stage.await_resumed(pids, now(), 0, "a step after the outage")
    return stage.book.gap(pids, t, end), steps


def _worker_lost_meanwhile(stage: Stage, before: Standing, repeat: int) -> Effect:
    """Kill a worker while etcd is away; how soon the others go on when it is back."""
    name = before.nodes[-1 - repeat % len(before.nodes)]
    victim = worker(stage, before, name)
    stage.server.kill()
    kill([victim])
    pause(LEFT_S)
    if stage.server.is_healthy():
        raise DrillError("etcd answers although it was killed")
    stage.server.launch()
    stage.server.wait_healthy(Deadline.after(stage.setting.limit_s))
    return aftermath(stage, before, f"worker of {name} killed meanwhile", now(), [name])


def etcd_leader_loss(stage: Stage, repeat: int) -> Effect:
    """The leader of three etcd servers is killed: nothing happens to the job. A worker killed before there is a new
    leader recovers with it; recovery counts from that worker's death."""
    before = stage.await_steps()
    first = _leader(stage)
    t = now()
    stage.servers.kill(first)
    _leader(stage, but=first)
    elected_s = now() - t
    calm = aftermath(stage, before, f"etcd's leader m{first} killed", t, later=False)
    standing = stage.await_steps()
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
    return Effect(
        what=what,
        recovery_s=effect.recovery_s,
        gap_s=calm.gap_s,
        steps_lost=max(effect.steps_lost, calm.steps_lost),
        details={"elected_s": elected_s},
        problems=(*problems, *effect.problems),
    )


def _leader(stage: Stage, but: int = -1) -> int:
    """The index of etcd's leader, once it is not ``but``; a busy machine may be between two of them for a second."""

    def found() -> tuple[int] | None:
        with suppress(StoreUnavailableError):
            return (index,) if (index := stage.servers.leader()) != but else None
        return None

    (index,) = stage.until(found, "a leader of etcd")
    return int(index)


# ---- shards


def group_kill(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a node of a group of two: the other group goes on, and a new node makes this one whole again."""
    before = stage.await_steps()
    last = len(before.nodes) - 1 - repeat % len(before.nodes)
    name, group = before.nodes[last], before.nodes[last - last % 2 : last - last % 2 + 2]
    t = kill_nodes(stage, [name])
    effect = aftermath(stage, before, f"node {name} of the group {' '.join(group)} killed", t, group)
    began = now()
    stage.restore()
    standing = stage.await_steps()
    survivors = {worker: pid for worker, pid in before.pids.items() if split_worker(worker)[0] != name}
    first = min(steps for node in group if (steps := stage.book.first_step(node, standing.round)) is not None)
    effect = replace(effect, steps_lost=stage.book.committed_again(survivors.values()))
    return effect.amended({"rejoin_s": first - began}, restarted(stage, survivors))


def reshard(stage: Stage, repeat: int) -> Effect:
    """SIGKILL a node of a model that is sharded over all of them, which is sharded anew without it; then one joins.

    All workers start again each time. Steps behind the newest state that is left are repeated; lost are those that a
    checkpoint held.
    """
    before = stage.await_steps()
    saved = stage.until(lambda: _saved(stage), "a checkpoint")
    name = before.nodes[-1 - repeat % len(before.nodes)]
    killed = Injected(Fault(FaultKind.KILL_NODE, saved), name, (), kill_nodes(stage, [name]), before.round, saved)
    smaller = stage.await_steps()
    without = _recovered(stage, killed)
    t, joining = now(), stage.cluster.add().name
    joined = Injected(Fault(FaultKind.JOIN, without.step), joining, (), t, smaller.round, without.step)
    after = stage.await_steps()
    with_it = _recovered(stage, joined)
    worlds, expected = [before.world, smaller.world, after.world], [before.world, before.world - 1, before.world]
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
        problems=() if worlds == expected else (f"the model was sharded over {worlds} ranks, not over {expected}",),
    )


def _saved(stage: Stage) -> int:
    """The step of the newest checkpoint; 0 without any."""
    stage.observe()
    return max((line.step for line in stage.book.lines if line.event is LineKind.CHECKPOINT), default=0)


def _recovered(stage: Stage, injected: Injected) -> Recovery:
    found = recovery(injected, stage.book.lines)
    if found is None:
        raise DrillError(f"no step was made after: {injected}")
    return found
