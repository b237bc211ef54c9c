"""What alerts say, word for word, in some scenes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.rulescenes.firing import (
    BELOW,
    DAMAGED,
    EXHAUSTING,
    FAILED,
    FAILING,
    FLAPPING,
    GOODPUT,
    LOOP,
    MISSING,
    NO_MONITOR,
    NONFINITE,
    SLOW,
    STALE,
    STALLED,
    STORE,
    STRAGGLER,
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
        "The last checkpoint of RUN is 20m 30s older than its last step (or none was ever "
        "written). One is due every 30s. All that would be lost if every node went now.",
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
        "RUN has ended without success and will not go on by itself. elastic-trainer events RUN shows what closed it.",
    ),
    "wasteful": Text(
        170,
        GOODPUT,
        "speed",
        "Run RUN trained in only 25% of the last hour",
        "In the last hour 25% of the rank time of RUN went into training and evaluating (50 % is the limit). The "
        "rest: healing (3.00 ranks).",
        {"window": "1h"},
    ),
    "somewhat-wasteful": Text(
        390,
        GOODPUT,
        "speed",
        "Run RUN trained in only 70% of the last six hours",
        "In the last six hours 70% of the rank time of RUN went into training and evaluating (80 % is the limit),"
        " and it is no better now. The rest: data (1.20 ranks).",
        {"window": "6h"},
    ),
    "node-without-etcd": Text(
        30,
        STORE,
        "store",
        "Node n1 of run RUN does not reach etcd",
        "etcd has not answered node n1 of RUN for 10m 0s. Training goes on, but no node can come, go or be "
        "replaced until it does. Nodes without etcd: 1.",
        {"node": "n1"},
    ),
    "monitor-gone": Text(
        30,
        NO_MONITOR,
        "watch",
        "No monitor answers",
        "Prometheus gets nothing from the monitor. Training does not need it, but alerts about nodes, rounds and "
        "checkpoints are blind, and new nodes are not scraped.",
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
