"""What alerts say, word for word, in some scenes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """One alert as it must be told: ``labels`` without severity and family."""

    name: str
    severity: str
    family: str
    labels: Mapping[str, str]
    summary: str
    description: str


TOLD: dict[str, tuple[tuple[float, Alert], ...]] = {
    "stalled": (
        (
            30,
            Alert(
                "Stalled",
                "critical",
                "progress",
                {"run": "a"},
                "Run a stands still",
                "No rank of a has made a step for 10m 30s. Ranks seen: 4. They are in: training (4). See "
                "elastic-trainer status a and the agents' logs for worker.killed and stacks.",
            ),
        ),
    ),
    "never-a-round": (
        (
            15,
            Alert(
                "RendezvousSlow",
                "warning",
                "membership",
                {"run": "a"},
                "Run a has been gathering its nodes for 14m 59s",
                "a has had no round of ranks that train for 14m 59s. Nodes by state: ready (4) of at least 2.",
            ),
        ),
    ),
    "too-few": (
        (
            25,
            Alert(
                "BelowMinNodes",
                "critical",
                "membership",
                {"run": "a"},
                "Run a has too few nodes to train",
                "a has 1 node(s) and needs 2. Nodes that are there wait, and give up after join_timeout (10 "
                "minutes by default).",
            ),
        ),
    ),
    "rank-unseen": (
        (
            30,
            Alert(
                "RanksMissing",
                "warning",
                "membership",
                {"run": "a"},
                "1 rank(s) of run a are not seen",
                "The round of a has 1 rank(s) more than Prometheus sees. Look for node targets that are down: "
                'up{job="elastic-trainer-nodes"} == 0.',
            ),
        ),
    ),
    "restart-loop": (
        (
            32,
            Alert(
                "RestartLoop",
                "critical",
                "restarts",
                {"run": "a"},
                "Run a fails again and again",
                "6 rounds of a ended by a fault in 15 minutes: worker_lost (6). failure_limit failures at one "
                "step close the run as failed; without a Session --max-restarts is the end.",
            ),
        ),
    ),
    "restarts": (
        (
            195,
            Alert(
                "RestartsExhausting",
                "warning",
                "restarts",
                {"run": "a"},
                "Workers of run a fail often",
                "Workers of a have failed 5 times in six hours. Each time one node uses up one of its --max-"
                "restarts; a node without any left is lost to the job.",
            ),
        ),
    ),
    "flapping": (
        (
            48,
            Alert(
                "MembershipFlapping",
                "warning",
                "membership",
                {"run": "a"},
                "Nodes of run a come and go",
                "Nodes have joined a 5 times in 30 minutes, and left or been lost as often. elastic-trainer "
                "events a names them.",
            ),
        ),
    ),
    "straggler": (
        (
            40,
            Alert(
                "Straggler",
                "warning",
                "speed",
                {"rank": "2", "run": "a"},
                "Rank 2 of run a slows all others down",
                "Rank 2 of a (node n2, device cpu) computes 2.00 times as long as the median rank, and all wait "
                "for it at each step.",
            ),
        ),
    ),
    "saves-stop": (
        (
            40,
            Alert(
                "CheckpointStale",
                "critical",
                "checkpoint",
                {"run": "a"},
                "Run a trains without saving",
                "The last checkpoint of a is 20m 30s older than its last step (or there has been none for so "
                "long). One is due every 30s. All that would be lost if every node went now.",
            ),
        ),
    ),
    "saves-fail": (
        (
            30,
            Alert(
                "CheckpointFailing",
                "critical",
                "checkpoint",
                {"op": "save", "run": "a"},
                "Run a cannot save its checkpoints",
                "21 save(s) of a failed in 15 minutes, and none has succeeded since. The training goes on. Look "
                "for checkpoint.failed in the log of rank 0's node, and at the space and the permissions of the "
                "checkpoint directory.",
            ),
        ),
    ),
    "damaged": (
        (
            25,
            Alert(
                "CheckpointFailing",
                "warning",
                "checkpoint",
                {"op": "load", "run": "a"},
                "A checkpoint of run a is damaged",
                "1 checkpoint(s) of a could not be loaded in the last 15 minutes. They were put aside as "
                "corrupt-*, and an older one is taken. See elastic-trainer checkpoints DIRECTORY --verify.",
            ),
        ),
    ),
    "nan": (
        (
            21,
            Alert(
                "NonFiniteLoss",
                "critical",
                "loss",
                {"run": "a"},
                "The loss of run a is NaN or infinite",
                "Ranks of a have found a loss that is not finite about 2 times in 15 minutes. Steps from here on"
                " may train nothing. See elastic-trainer events a for the first such step, and the loss in the "
                "dashboard.",
            ),
        ),
    ),
    "failed": (
        (
            25,
            Alert(
                "RunFailed",
                "critical",
                "progress",
                {"run": "a"},
                "Run a was closed as failed",
                "a has ended without success and will not go on by itself. elastic-trainer events a tells what "
                "closed it.",
            ),
        ),
    ),
    "wasteful": (
        (
            170,
            Alert(
                "GoodputLow",
                "warning",
                "speed",
                {"run": "a", "window": "1h"},
                "Run a trained in only 25% of the last hour",
                "In the last hour 25% of the rank time of a went into training and evaluating (50 % is the "
                "limit). The rest: healing (3.00 ranks).",
            ),
        ),
    ),
    "somewhat-wasteful": (
        (
            400,
            Alert(
                "GoodputLow",
                "warning",
                "speed",
                {"run": "a", "window": "6h"},
                "Run a trained in only 70% of the last six hours",
                "In the last six hours 70% of the rank time of a went into training and evaluating (80 % is the "
                "limit), and it is no better now. The rest: data (1.20 ranks).",
            ),
        ),
    ),
    "node-without-etcd": (
        (
            30,
            Alert(
                "StoreUnreachable",
                "critical",
                "store",
                {"node": "n1", "run": "a"},
                "Node n1 of run a does not reach etcd",
                "etcd has not answered node n1 of a for 10m 0s. Training goes on, but no node can come, go or be"
                " replaced until it does. Nodes without etcd: 1.",
            ),
        ),
    ),
    "monitor-gone": (
        (
            30,
            Alert(
                "MonitorDown",
                "warning",
                "watch",
                {},
                "No monitor answers",
                "Prometheus gets nothing from the monitor. Training does not need it, but alerts about nodes, "
                "rounds and checkpoints are blind, and new nodes are not scraped.",
            ),
        ),
    ),
    "run-unwatched": (
        (
            30,
            Alert(
                "MonitorDown",
                "warning",
                "watch",
                {"run": "a"},
                "Nobody watches run a any more",
                "Prometheus gets nothing from the monitor about a. Training does not need it, but alerts about "
                "nodes, rounds and checkpoints are blind, and new nodes are not scraped.",
            ),
        ),
    ),
}
"""By the name of the scene: at which minute, and what."""
