"""The table of drills, and how one is played from an empty directory to a verdict.

*Runs in* the main thread of the command or test.
*Owns* the directory, which is removed after a success unless it is to be kept; all processes are gone at the return.
*Fails by* ConfigError for a drill that cannot be played here; a drill that goes wrong is a report that is not ok.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_trainer.drills import strikes
from elastic_trainer.drills.harness import new_directory
from elastic_trainer.drills.job import Sharded
from elastic_trainer.drills.measure import Effect, compared, round_problems, sample_problems, state_problems
from elastic_trainer.drills.report import Report
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.local.hosts import Segment, check_possible, current, lacks
from elastic_trainer.local.processes import Interrupts


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. ``act`` strikes a stage for the nth time, counted from 0."""

    name: str
    act: Callable[[Stage, int], Effect]
    setting: Setting = field(default_factory=Setting)
    parts: bool = False
    """Whether it cuts networks, so that each node must have a host of its own."""
    limit_s: float | None = None
    """What recovery may take on a machine that does nothing else."""

    @property
    def summary(self) -> str:
        return _SUMMARIES[self.name]

    def play(self, stage: Stage, repeat: int) -> Effect:
        """Strike once, and leave the stage as it was."""
        effect = self.act(stage, repeat)
        stage.restore()
        return effect


_FOUR = Setting(nodes=4, max_nodes=4)
_SHARDED = Setting(nodes=2, min_nodes=1, workers=2, sharded=Sharded.GROUP)
_GROUPS = Setting(nodes=4, max_nodes=4, sharded=Sharded.GROUP, options={"shard_nodes": "2"})
_OVER_ALL = Setting(sharded=Sharded.JOB, save_every_s=1.0, options={"recovery": "restart"})
_IMPATIENT = {"hang_timeout": "2", "step_timeout": "2", "first_step_timeout": "30"}
_SUMMARIES = {
    "worker-kill": "SIGKILL one worker process",
    "node-kill": "SIGKILL a whole node, agent and worker",
    "rank0-node-kill": "SIGKILL the node that hosts rank 0",
    "worker-freeze": "SIGSTOP one worker whose agent lives on, then thaw it",
    "worker-hang": "SIGSTOP one worker for good: its agent ends it",
    "worker-wedge": "a worker gets stuck: interpreter locked, loop, data set, collective",
    "node-freeze": "SIGSTOP a whole node, then thaw it",
    "node-partition": "cut a node's network silently, then mend it (needs root)",
    "pair-partition": "cut the way from one node to another, which both reach all others, then mend it (needs root)",
    "node-join": "one more node joins",
    "node-drain": "SIGTERM to a node, which leaves by a planned change",
    "double-kill": "SIGKILL two of four nodes at once",
    "kill-during-recovery": "SIGKILL a second worker within 50 ms of a first",
    "kill-during-join": "SIGKILL a member's worker, or the newcomer's, when a join begins",
    "shard-kill": "SIGKILL a worker of a node whose two workers hold shards of one model",
    "shard-join": "one more node joins nodes of two workers each, and gets its shards from them",
    "group-kill": "SIGKILL a node of one of two shard groups of two nodes; a new one fills its place",
    "reshard": "SIGKILL a node of a model that is sharded over the whole job (restart mode); then one joins",
    "busy-machine": "eight busy loops beside the job for --seconds: nothing is lost by it",
    "etcd-outage": "kill etcd for --seconds; then again, and a worker meanwhile",
    "etcd-leader-loss": "kill the leader of three etcd servers; then again, and a worker at once",
}
DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (
        Drill("worker-kill", strikes.worker_kill),
        Drill("node-kill", strikes.node_kill),
        Drill("rank0-node-kill", strikes.rank0_node_kill),
        Drill("worker-freeze", strikes.worker_freeze, limit_s=1.5),
        Drill("worker-hang", strikes.worker_hang, Setting(options={"hang_timeout": "2"})),
        Drill("worker-wedge", strikes.worker_wedge, Setting(wedges=True, options=_IMPATIENT)),
        Drill("node-freeze", strikes.node_freeze, limit_s=0.6),
        Drill("node-partition", strikes.node_partition, parts=True, limit_s=0.6),
        Drill("pair-partition", strikes.pair_partition, parts=True, limit_s=2.0),
        Drill("node-join", strikes.node_join, Setting(nodes=2)),
        Drill("node-drain", strikes.node_drain),
        Drill("double-kill", strikes.double_kill, _FOUR),
        Drill("kill-during-recovery", strikes.kill_during_recovery, _FOUR),
        Drill("kill-during-join", strikes.kill_during_join),
        Drill("shard-kill", strikes.worker_kill, _SHARDED),
        Drill("shard-join", strikes.node_join, _SHARDED),
        Drill("group-kill", strikes.group_kill, _GROUPS),
        Drill("reshard", strikes.reshard, _OVER_ALL),
        Drill("busy-machine", strikes.busy_machine),
        Drill("etcd-outage", strikes.etcd_outage),
        Drill("etcd-leader-loss", strikes.etcd_leader_loss, Setting(etcd_members=3)),
    )
}


def named(name: str) -> Drill:
    """The drill called ``name``, if it can be played here. Raises ConfigError."""
    if name not in DRILLS:
        raise ConfigError(f"there is no drill {name!r}", hint=f"one of: {', '.join(DRILLS)}")
    drill = DRILLS[name]
    if drill.parts:
        check_possible()
    return drill


# ---- playing one

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """What to play. ``slack_s`` is what a recovery may take beyond its limit, on a machine that is busy."""

    name: str
    repeats: int = 1
    seconds: float = 60.0
    slack_s: float = 0.0
    directory: Path | None = None
    keep: bool = False


def run_drill(options: DrillOptions, say: Say = lambda _: None) -> Report:
    """Play it; ``say`` receives a line for each thing that happens."""
    drill = named(options.name)
    default = Path(tempfile.gettempdir()) / f"elastic-trainer-drill-{secrets.token_hex(4)}"
    directory = new_directory(default if options.directory is None else options.directory.absolute())
    with Interrupts() as interrupts, ExitStack() as stack:
        if current() is None and (lacking := lacks()) is None:
            stack.enter_context(Segment())
        elif current() is None:
            say(f"{drill.name}: nodes share this machine's network and processes: hosts of their own need {lacking}")
        effects, problems, points = _play(drill, options, directory, interrupts, say)
    report = Report(drill.name, tuple(effects), (*problems, *unmet(drill, options, effects)), points, directory)
    if report.ok and options.directory is None and not options.keep:
        shutil.rmtree(directory, ignore_errors=True)
    return report


def _play(
    drill: Drill, options: DrillOptions, directory: Path, interrupts: Interrupts, say: Say
) -> tuple[list[Effect], list[str], int]:
    """The effects of all repeats, what was wrong, and at how many points the ranks' states were compared."""
    effects: list[Effect] = []
    try:
        setting = replace(drill.setting, outage_s=options.seconds)
        with staged(setting, directory, interrupts=interrupts) as stage:
            say(f"{drill.name}: {drill.summary}; {drill.setting.nodes} nodes start")
            try:
                for repeat in range(options.repeats):
                    effects.append(drill.play(stage, repeat))
                    say(f"{repeat + 1} of {options.repeats}: {effects[-1].what}")
                return effects, conclusions(stage), compared(stage.digests())
            except ElasticTrainerError as error:
                return effects, [str(error), *stage.log_tails()], 0
    except ElasticTrainerError as error:  # the stage itself: no etcd, no network
        return effects, [str(error)], 0


def conclusions(stage: Stage) -> list[str]:
    """End the job of ``stage``; everything that is wrong with what it leaves behind."""
    members = sorted(stage.await_steps().nodes)
    problems = stage.finish()
    digests = stage.digests()
    problems += sample_problems(stage.book.lines, stage.setting.samples)
    problems += state_problems(digests, members)
    problems += round_problems(stage.history)
    if not compared(digests) and stage.setting.sharded is not Sharded.JOB:  # which has one replica
        problems.append("the states of ranks were never compared")
    return problems


def unmet(drill: Drill, options: DrillOptions, effects: list[Effect]) -> list[str]:
    """What the single repeats did not keep to."""
    problems = []
    limit_s = drill.limit_s + options.slack_s if drill.limit_s is not None else None
    for number, effect in enumerate(effects, 1):
        problems += [f"repeat {number}: {problem}" for problem in effect.problems]
        if effect.steps_lost:
            problems.append(f"repeat {number}: survivors committed {effect.steps_lost} steps again")
        if limit_s is not None and effect.recovery_s > limit_s:
            problems.append(f"repeat {number}: recovery took {effect.recovery_s:.2f} s, more than {limit_s:g} s")
    return problems
