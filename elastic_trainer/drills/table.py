"""The table of drills: what each is called, what it does, and what it is played with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_trainer.drills import node_faults, partition, shard_faults
from elastic_trainer.drills.busy import busy_machine
from elastic_trainer.drills.etcd_faults import etcd_leader_loss, etcd_outage
from elastic_trainer.drills.job import Sharded
from elastic_trainer.drills.measure import Effect
from elastic_trainer.drills.stage import Setting, Stage
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.hosts import Segment, check_possible

Act = Callable[[Stage, int, float], Effect]
"""Strikes a stage for the nth time, counted from 0; an outage or a load lasts that many seconds."""


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. ``act`` strikes once and leaves the stage as it was."""

    name: str
    summary: str
    act: Act
    setting: Setting = field(default_factory=Setting)
    parts: bool = False
    """Whether it cuts networks, so that each node must have a host of its own."""
    limit_s: float | None = None
    """What recovery may take on a machine that does nothing else."""


def _plain(act: Callable[[Stage, int], Effect]) -> Act:
    return lambda stage, repeat, _: act(stage, repeat)


def _outage(stage: Stage, repeat: int, seconds: float) -> Effect:
    return etcd_outage(stage, repeat, seconds)


def _busy(stage: Stage, repeat: int, seconds: float) -> Effect:
    return busy_machine(stage, repeat, seconds)


def _parting(act: Callable[[Stage, int, Segment], Effect]) -> Act:
    def strike(stage: Stage, repeat: int, _: float) -> Effect:
        if stage.cluster.segment is None:
            raise RuntimeError("a partition needs a network segment")
        return act(stage, repeat, stage.cluster.segment)

    return strike


_FOUR = Setting(nodes=4, max_nodes=4)
_SHARDED = Setting(nodes=2, min_nodes=1, workers=2, sharded=Sharded.GROUP)
DRILLS: dict[str, Drill] = {
    drill.name: drill
    for drill in (
        Drill("worker-kill", "SIGKILL one worker process", _plain(node_faults.worker_kill)),
        Drill("node-kill", "SIGKILL a whole node, agent and worker", _plain(node_faults.node_kill)),
        Drill("rank0-node-kill", "SIGKILL the node that hosts rank 0", _plain(node_faults.rank0_node_kill)),
        Drill(
            "worker-freeze",
            "SIGSTOP one worker whose agent lives on, then thaw it",
            _plain(node_faults.worker_freeze),
            limit_s=1.5,
        ),
        Drill(
            "worker-hang",
            "SIGSTOP one worker for good: its agent ends it",
            _plain(node_faults.worker_hang),
            Setting(options={"hang_timeout": "2"}),
        ),
        Drill(
            "worker-wedge",
            "a worker gets stuck: interpreter locked, loop, data set, collective",
            _plain(node_faults.worker_wedge),
            Setting(wedges=True, options={"hang_timeout": "2", "step_timeout": "2", "first_step_timeout": "30"}),
        ),
        Drill(
            "node-freeze",
            "SIGSTOP a whole node, then thaw it",
            _plain(node_faults.node_freeze),
            limit_s=0.6,
        ),
        Drill(
            "node-partition",
            "cut a node's network silently, then mend it (needs root)",
            _parting(partition.node_partition),
            parts=True,
            limit_s=0.6,
        ),
        Drill(
            "pair-partition",
            "cut the way from one node to another, which both reach all others, then mend it (needs root)",
            _parting(partition.pair_partition),
            parts=True,
            limit_s=2.0,
        ),
        Drill("node-join", "one more node joins", _plain(node_faults.node_join), Setting(nodes=2)),
        Drill("node-drain", "SIGTERM to a node, which leaves by a planned change", _plain(node_faults.node_drain)),
        Drill("double-kill", "SIGKILL two of four nodes at once", _plain(node_faults.double_kill), _FOUR),
        Drill(
            "kill-during-recovery",
            "SIGKILL a second worker within 50 ms of a first",
            _plain(node_faults.kill_during_recovery),
            _FOUR,
        ),
        Drill(
            "kill-during-join",
            "SIGKILL a member's worker, or the newcomer's, when a join begins",
            _plain(node_faults.kill_during_join),
        ),
        Drill(
            "shard-kill",
            "SIGKILL a worker of a node whose two workers hold shards of one model",
            _plain(node_faults.worker_kill),
            _SHARDED,
        ),
        Drill(
            "shard-join",
            "one more node joins nodes of two workers each, and gets its shards from them",
            _plain(node_faults.node_join),
            _SHARDED,
        ),
        Drill(
            "group-kill",
            "SIGKILL a node of one of two shard groups of two nodes; a new one fills its place",
            _plain(shard_faults.group_kill),
            Setting(nodes=4, max_nodes=4, sharded=Sharded.GROUP, options={"shard_nodes": "2"}),
        ),
        Drill(
            "reshard",
            "SIGKILL a node of a model that is sharded over the whole job (restart mode); then one joins",
            _plain(shard_faults.reshard),
            Setting(sharded=Sharded.JOB, save_every_s=1.0, options={"recovery": "restart"}),
        ),
        Drill("busy-machine", "eight busy loops beside the job for --seconds: nothing is lost by it", _busy),
        Drill("etcd-outage", "kill etcd for --seconds; then again, and a worker meanwhile", _outage),
        Drill(
            "etcd-leader-loss",
            "kill the leader of three etcd servers; then again, and a worker at once",
            _plain(etcd_leader_loss),
            Setting(etcd_members=3),
        ),
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
