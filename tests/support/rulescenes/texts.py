"""What alerts say, word for word, in some scenes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.rulescenes.firing import (
    BELOW,
    DAMAGED,
    ETCD_SLOW,
    ETCD_SPACE,
    EXHAUSTING,
    FAILED,
    FAILING,
    FLAPPING,
    GOODPUT,
    LOOP,
    LOST,
    MEMBER_DOWN,
    MISSING,
    NO_LEADER,
    NO_MONITOR,
    NONFINITE,
    SLOW,
    SPACE,
    SPARES,
    STALE,
    STALLED,
    STOPPED,
    STORE,
    STORE_OF_ALL,
    STRAGGLER,
    SWITCH,
    UNWATCHED,
)
from tests.support.rulescenes.scene import Fires


@dataclass(frozen=True)
class Text:
    """What an alert says at ``minute``. RUN stands for the name of the run."""

    minute: float
    alert: Fires
    family: str
    summary: str
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels beside run, severity and family."""
    cost: str = ""
    """What it costs, where that has figures."""


TEXTS: dict[str, Text] = {
    "stalled": Text(
        30,
        STALLED,
        "progress",
        "Run RUN stands still",
        "No rank of RUN has made a step for 10m 30s. Ranks seen: 4. They are in: training (4). See elastic-"
        "trainer status RUN and the agents' logs for worker.killed and stacks.",
    ),
    "never-a-round": Text(
        15,
        SLOW,
        "membership",
        "Run RUN has been gathering its nodes for 14m 59s",
        "RUN has had no round of ranks that train for 14m 59s. Nodes by state: ready (4) of at least 2.",
    ),
    "too-few": Text(
        25,
        BELOW,
        "membership",
        "Run RUN has too few nodes to train",
        "RUN has 1 node(s) and needs 2. Nodes that are there wait, and give up after join_timeout (10 minutes by "
        "default).",
    ),
    "rank-unseen": Text(
        30,
        MISSING,
        "membership",
        "1 rank(s) of run RUN are not seen",
        "The round of RUN has 1 rank(s) more than Prometheus sees. Look for node targets that are down: "
        'up{job="elastic-trainer-nodes"} == 0.',
    ),
    "restart-loop": Text(
        32,
        LOOP,
        "restarts",
        "Run RUN fails again and again",
        "6 rounds of RUN ended by a fault in 15 minutes: worker_lost (6). failure_limit failures at one step "
        "close the run as failed; without a Session --max-restarts is the end.",
    ),
    "restarts": Text(
        195,
        EXHAUSTING,
        "restarts",
        "Workers of run RUN fail often",
        "Workers of RUN have failed 5 times in six hours. Each time one node uses up one of its --max-restarts; a"
        " node without any left is lost to the job.",
    ),
    "flapping": Text(
        48,
        FLAPPING,
        "membership",
        "Nodes of run RUN come and go",
        "Nodes have joined RUN 5 times in 30 minutes, and left or been lost as often. elastic-trainer events RUN "
        "names them.",
    ),
    "straggler": Text(
        40,
        STRAGGLER,
        "speed",
        "Rank 2 of run RUN slows all others down",
        "Rank 2 of RUN (node n2, device cpu) computes 2.00 times as long as the median rank, and all wait for it at"
        " each step.",
        {"rank": "2"},
    ),
    "saves-stop": Text(
        40,
        STALE,
        "checkpoint",
        "Run RUN trains without saving",
        "The last checkpoint of RUN was saved 20m 30s ago. One is due every 30s.",
    ),
    "saves-fail": Text(
        30,
        FAILING,
        "checkpoint",
        "Run RUN cannot save its checkpoints",
        "21 save(s) of RUN failed in 15 minutes, and none has succeeded since. The training goes on. Look for "
        "checkpoint.failed in the log of rank 0's node, and at the space and the permissions of the checkpoint "
        "directory.",
        {"op": "save"},
    ),
    "damaged": Text(
        25,
        DAMAGED,
        "checkpoint",
        "A checkpoint of run RUN is damaged",
        "1 checkpoint(s) of RUN could not be loaded in the last 15 minutes. They were put aside as corrupt-*, and"
        " an older one is taken. See elastic-trainer checkpoints verify DIRECTORY --all.",
        {"op": "load"},
    ),
    "nan": Text(
        21,
        NONFINITE,
        "loss",
        "The loss of run RUN is NaN or infinite",
        "Ranks of RUN have found a loss that is not finite about 2 times in 15 minutes. Steps from here on may "
        "train nothing. See elastic-trainer events RUN for the first such step, and the loss in the dashboard.",
    ),
    "failed": Text(
        25,
        FAILED,
        "progress",
        "Run RUN was closed as failed",
        "RUN has ended without success 5m 0s ago and will not go on by itself. elastic-trainer events RUN shows what "
        "closed it.",
        cost="All steps after its last checkpoint are lost (saved 5m 30s ago), and its machines are idle.",
    ),
    "wasteful": Text(
        170,
        GOODPUT,
        "speed",
        "Run RUN trained in only 25% of the last hour",
        "In the last hour 25% of the rank time of RUN went into training and evaluating (50 % is the limit). The "
        "rest: healing (3.00 ranks).",
        {"window": "1h"},
        "25% of the time that is paid for trains; the rest does not.",
    ),
    "somewhat-wasteful": Text(
        390,
        GOODPUT,
        "speed",
        "Run RUN trained in only 70% of the last six hours",
        "In the last six hours 70% of the rank time of RUN went into training and evaluating (80 % is the limit),"
        " and it is no better now. The rest: data (1.20 ranks).",
        {"window": "6h"},
        "70% of the time that is paid for trains; the rest does not.",
    ),
    "node-without-etcd": Text(
        30,
        STORE,
        "store",
        "1 node(s) of run RUN do not reach etcd",
        "etcd has not answered 1 node(s) of RUN for more than two minutes, of 4. Training goes on, but none of them "
        "can be replaced until it does.",
    ),
    "failed-and-etcd-away": Text(
        35,
        STORE_OF_ALL,
        "store",
        "etcd does not answer: no run can change",
        "Nodes without etcd: none is seen, of 0 run(s). Alerts about nodes, rounds and saves keep silent meanwhile.",
        {"component": "store"},
    ),
    "etcd-without-leader": Text(
        30,
        NO_LEADER,
        "store",
        "etcd has no leader",
        "No member of etcd has had a leader for three minutes: a majority of them is away or apart. Members that "
        "answer: 3.",
    ),
    "etcd-member-down": Text(
        30,
        MEMBER_DOWN,
        "store",
        "1 member(s) of etcd are down",
        "1 of 3 member(s) of etcd have not answered for three minutes.",
    ),
    "etcd-nearly-full": Text(
        30,
        ETCD_SPACE,
        "store",
        "The database of etcd is at 85% of its quota",
        "At 100 % etcd takes no write any more (alarm NOSPACE). Compaction keeps it small: see whether "
        "--auto-compaction-retention is set, and forget runs that are over.",
    ),
    "etcd-slow": Text(
        40,
        ETCD_SLOW,
        "store",
        "The disk of etcd etcd-slow-etcd-2:2379 is slow",
        "1 % of the syncs of etcd etcd-slow-etcd-2:2379 take longer than 822.4ms (0.5 s is the limit). Leases end and "
        "leaders change when it gets worse.",
        {"instance": "etcd-slow-etcd-2:2379"},
    ),
    "stopped": Text(
        500,
        STOPPED,
        "progress",
        "Run RUN was stopped and has not been started again",
        "The last node of RUN left on request more than eight hours ago. It goes on where it was when its nodes are "
        "started.",
    ),
    "nodes-lost": Text(
        40,
        LOST,
        "membership",
        "Run RUN lost 2 node(s) and got none back",
        "A third or more of the nodes of RUN is gone by faults and was not replaced: 2 are left.",
    ),
    "spares-used-up": Text(
        40,
        SPARES,
        "membership",
        "Run RUN has no spare node left",
        "RUN had 1 spare node(s) in the last six hours. They have replaced lost ones, or were lost.",
    ),
    "disk-fills-up": Text(
        30,
        SPACE,
        "checkpoint",
        "The disk for checkpoints of run RUN fills up",
        "3.725GiB were free after the last save; one checkpoint has 953.7MiB.",
    ),
    "alive": Text(
        5,
        SWITCH,
        "watch",
        "Alerts are delivered",
        "The way from Prometheus through Alertmanager to people works.",
    ),
    "monitor-gone": Text(
        30,
        NO_MONITOR,
        "watch",
        "The monitor does not answer, or only now and then",
        "Prometheus gets nothing from the monitor. Training does not need it, but alerts about nodes, rounds and "
        "checkpoints are blind, and new nodes are not scraped.",
    ),
    "etcd-away-monitor-slow": Text(
        45,
        NO_MONITOR,
        "watch",
        "The monitor does not answer, or only now and then",
        "The monitor stopped answering 7 times in 15 minutes. Training does not need it, but alerts about nodes, "
        "rounds and checkpoints are blind, and new nodes are not scraped.",
    ),
    "run-unwatched": Text(
        30,
        UNWATCHED,
        "watch",
        "Nobody watches run RUN any more",
        "Prometheus gets nothing from the monitor about RUN. Training does not need it, but alerts about nodes, "
        "rounds and checkpoints are blind, and new nodes are not scraped.",
    ),
}
"""By the name of the scene."""
