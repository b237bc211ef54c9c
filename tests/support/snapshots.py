"""Snapshots of made-up runs, as ``/api/runs/<run>`` has them, for the tests of the status page.

They are made of numbers alone, so each is the same in every test run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from elastic_trainer.membership.documents import Incident
from elastic_trainer.monitor.snapshot import incident as described

Json = dict[str, Any]

WALL = 1_789_000_000.0
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"


def rank(number: int, per_node: int = 2, **changes: Any) -> Json:
    """A rank that trains."""
    return {
        "rank": number, "local_rank": number % per_node, "pid": 4100 + number, "device": f"cuda:{number % per_node}",
        "phase": "training", "phase_s": 312.0 + number, "still_s": 0.12, "step": 48_210,
        "step_s": 0.212 + 0.001 * (number % 3), "compute_s": 0.181 + 0.002 * (number % 4),
        "slowdown": 1.0 + 0.01 * (number % 4), "straggler": False, "stall": None,
    } | changes  # fmt: skip


def node(place: int, per_node: int = 2, **changes: Any) -> Json:
    """A node that is ready and in the round."""
    return {
        "node": f"node-{place}", "host": f"gpu-{place:03d}.cluster.example", "state": "ready", "in_round": True,
        "metrics": f"http://10.0.0.{place % 250}:9401", "age_s": 1.0 + place % 4,
        "ranks": [rank(place * per_node + local, per_node) for local in range(per_node)],
    } | changes  # fmt: skip


def incident(wall: float, cause: str | None, **changes: Any) -> Json:
    """An incident of which everything is known, with what the monitor concludes from it."""
    values: Json = {
        "wall": wall, "by": "node-0", "cause": cause, "kind": "round", "round": 5, "next_round": 6,
        "reason": "worker 3 of node-1 ended with signal 9", "nodes": ["node-1"], "ranks": [3],
        "world_before": 6, "world_after": 6, "step": 41_007, "steps_lost": 0,
        "detect_s": 0.08, "regroup_s": 0.31, "resume_s": 0.42,
    } | changes  # fmt: skip
    known = Incident.model_validate({name: value for name, value in values.items() if value is not None})
    return {**described(known), **values}


LOST = {"reason": "the key of node-2 has expired", "nodes": ["node-2"], "ranks": [4, 5], "world_after": 4}


def transition(number: int, state: str, wall: float, world_size: int, reason: str, nodes: int = 3) -> Json:
    """One line of the journal."""
    names = [f"node-{place}" for place in range(nodes)]
    values = {"number": number, "state": state, "wall": wall, "reason": reason}
    return {**values, "world_size": world_size, "nodes": names}


def curves(points: int = 600, span_s: float = 10_800.0, until: float = WALL) -> Json:
    """A loss that falls and a step time that rests; no steps where the incidents of :func:`healthy` are."""
    walls = [until - span_s + span_s * place / (points - 1) for place in range(points)]
    chance = random.Random(7)
    away = [chance.random() - 0.5 for _ in range(points)]
    return {
        "wall": walls,
        "step": [int(48_210 - (until - wall) / 0.224) for wall in walls],
        "loss": [2.05 + 3.1 * math.exp(-4 * place / points) + 0.09 * away[place] for place in range(points)],
        "step_s": [0.212 + 0.012 * away[place] + (0.05 if 380 < place < 400 else 0) for place in range(points)],
        "world_size": [4 if 150 < place < 380 else 6 for place in range(points)],
    }


def concern(look: str, words: str, sentence: str) -> Json:
    """What needs attention."""
    return {"look": look, "words": words, "sentence": sentence}


def healthy(**changes: Any) -> Json:
    """Six ranks on three nodes; a node was lost and came back, a worker died, nothing of it hurt much."""
    journal = [
        transition(4, "active", WALL - 10_790, 6, "3 nodes are ready"),
        transition(4, "broken", WALL - 8_100, 6, "node-2 was lost"),
        transition(5, "active", WALL - 8_098, 4, "2 nodes are ready, and the wait for more has ended", 2),
        transition(5, "draining", WALL - 3_960, 4, "node-2 is ready", 2),
        transition(6, "active", WALL - 3_958, 6, "3 nodes are ready"),
        transition(6, "broken", WALL - 1_300.7, 6, "worker 3 of node-1 ended with signal 9"),
        transition(7, "active", WALL - 1_300, 6, "3 nodes are ready"),
    ]
    joined = {"reason": "node-2 is ready", "nodes": ["node-2"], "ranks": [], "world_before": 4, "detect_s": 0.0}
    lost = LOST | {"steps_lost": 12, "detect_s": 6.1, "regroup_s": 1.4, "resume_s": 0.7}
    incidents = [
        incident(WALL - 1_300.7, "worker_lost", round=6, next_round=7),
        incident(WALL - 3_960, "node_joined", **joined, regroup_s=0.9, resume_s=1.1),
        incident(WALL - 8_100, "node_lost", round=4, next_round=5, **lost),
    ]
    return {
        "run": "gpt-small-07", "state": "training", "state_s": 1_300.0, "epoch": 1, "min_nodes": 2, "max_nodes": 4,
        "recovery": "in_place", "round": 7, "round_reason": "3 nodes are ready", "world_size": 6, "step": 48_210,
        "loss": 2.0871, "samples": 9_256_320, "samples_per_s": 905.4, "steps_per_s": 4.7, "step_s": 0.213,
        "data_epoch": 3,
        "progress": {
            "step": 48_210, "epoch": 2, "epochs": 4, "last_step": None, "part": 0.531, "left_s": 9_060.0, "lr": 0.0003,
            "paused": False,
        }, "goodput": 0.968, "limits": {"straggler_ratio": 1.5}, "unreadable": [], "wall": WALL,
        "seconds": {
            "starting": 184.0, "waiting": 96.0, "rendezvous": 41.0, "healing": 122.0, "training": 62_700.0,
            "repeated": 15.2, "data": 890.0, "checkpoint": 610.0, "evaluation": 118.0, "ending": 0.0,
        },
        "checkpoint": {
            "step": 48_000, "age_s": 45.0, "bytes": 1_483_000_000, "duration_s": 2.9, "interval_s": 300.0,
            "saved": 36, "failed": 0,
        },
        "nodes": [node(place) for place in range(3)], "rounds": journal, "incidents": incidents, "curves": curves(),
        "store": {"connected": True, "age_s": 0.3},
    } | changes  # fmt: skip


def recovering() -> Json:
    """A node is gone, another one forms the next round, a third comes."""
    run = healthy(
        run="gpt-small-09", state="recovering", state_s=14.0, world_size=0, loss=2.0871, round_reason="node-2 was lost"
    )
    unknown: Json = dict.fromkeys(("phase", "phase_s", "still_s", "step", "step_s", "compute_s", "slowdown"))
    starting: Json = {"phase": "starting", "rank": None, "step": None, "step_s": None}
    run["nodes"] = [
        node(0, ranks=[rank(n, phase="rendezvous", phase_s=12.0, still_s=13.0) for n in (0, 1)]),
        node(1, ranks=[rank(2, phase="healing", phase_s=3.0), rank(3, phase="repeated", phase_s=1.0)]),
        node(2, state="gone", metrics="", age_s=21.0, ranks=[rank(n, **unknown) for n in (4, 5)]),
        node(3, state="warming", in_round=False, ranks=[rank(n, **starting) for n in (6, 7)]),
    ]
    run["attention"] = [concern("bad", "1 gone", "1 node is gone: node-2 (heard 21 s ago).")]
    run["rounds"].append(transition(7, "broken", WALL - 14, 6, "node-2 was lost"))
    nothing: Json = dict.fromkeys(("next_round", "world_after", "steps_lost", "regroup_s", "resume_s"))
    run["incidents"].insert(0, incident(WALL - 14, "node_lost", round=7, open=True, detect_s=6.2, **LOST | nothing))
    return run


def straggling() -> Json:
    """One rank is slow, one stands still, a checkpoint is late, a loss was not finite."""
    run = healthy(run="gpt-small-08", goodput=0.713, step_s=0.489)
    run["nodes"][1]["ranks"] = [
        rank(2, step_s=0.489, compute_s=0.455, slowdown=2.31, straggler=True),
        rank(3, still_s=74.0, phase_s=74.2, stall="still"),
    ]
    run["checkpoint"] |= {"age_s": 1_910.0, "failed": 2}
    run["attention"] = [
        concern("bad", "1 standing still", "1 rank makes no progress: rank 3 on node-1 (training, for 1 min 14 s)."),
        concern("warn", "the last 2 saves failed", "The last 2 saves failed."),
    ]
    why = "rank 2 computes 2.3 times as long as the median of all ranks"
    slow = incident(WALL - 260, None, kind="straggler", round=7, next_round=None, reason=why, ranks=[2])
    run["incidents"].insert(0, slow)
    return run


def failed() -> Json:
    """The run has ended, and not well."""
    why = "a worker failed 3 times within 60 s"
    run = healthy(run="vit-ablation-3", state="failed", state_s=5_400.0, world_size=0, nodes=[], round_reason=why)
    run["rounds"].append(transition(7, "closed", WALL - 5.0, 6, why))
    run["incidents"].insert(0, incident(WALL - 5.0, "finished", next_round=None, reason=why, steps_lost=40))
    return run


def large(nodes: int = 512, turn: int = 0) -> Json:
    """Many nodes of eight ranks: some gone, slow or busy with something else; ``turn`` makes snapshots differ."""
    others = {3: "healing", 5: "data", 7: "checkpoint"}
    run = healthy(run="llm-70b", world_size=nodes * 8, min_nodes=nodes - 12, max_nodes=nodes, step=48_210 + turn)
    run["nodes"] = []
    for place in range(nodes):
        phase = others.get((place + turn) % 41, "training")
        step = {"phase": phase, "step": 48_210 + turn, "step_s": 0.212 + 0.0001 * ((place + turn * 7) % 50)}
        ranks = [rank(place * 8 + local, 8, **step) for local in range(8)]
        run["nodes"].append(node(place, 8, ranks=ranks, age_s=float((place + turn) % 5)))
    run["nodes"][37 % nodes] |= {"state": "gone", "age_s": 41.0 + turn}
    run["nodes"][101 % nodes]["ranks"][3] |= {"straggler": True, "slowdown": 1.9, "compute_s": 0.35}
    run["curves"] = curves(1000)
    return run


def empty() -> Json:
    """A run of which only the name is known."""
    nothing: Json = {"nodes": [], "rounds": [], "incidents": [], "seconds": {}, "checkpoint": None, "wall": WALL}
    curves: Json = {"wall": [], "step": [], "loss": [], "step_s": [], "world_size": []}
    return {"run": "new", "state": "gathering", **nothing, "curves": curves}


def nulls(value: Any = None) -> Json:
    """Everything that may be null is null, in every list."""
    hollow: Json = _hollow(healthy())
    return hollow | {"run": "nulls", "state": "training"}


def _hollow(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _hollow(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_hollow(each) for each in value[:2]]
    return None if isinstance(value, int | float) and not isinstance(value, bool) else value


def hostile() -> Json:
    """Names and reasons that would break a page that inserts them as they are, and words nobody knows."""
    run = healthy(run="hostile", round_reason=HOSTILE, unreadable=[HOSTILE], state="</title><script>")
    run["nodes"] = [
        node(0, ranks=[rank(0, phase=HOSTILE, device=HOSTILE)])
        | {"node": HOSTILE, "host": HOSTILE, "state": HOSTILE, "metrics": "javascript:alert(1)//"},
        node(1, node="__proto__", state="constructor", ranks=[rank(1, phase="toString")]),
    ]
    run["incidents"][0] |= {"reason": HOSTILE, "nodes": [HOSTILE], "cause": HOSTILE}
    run["incidents"][1] |= {"kind": HOSTILE, "cause": None}
    run["rounds"][0] |= {"reason": HOSTILE, "state": HOSTILE}
    run["seconds"] |= {HOSTILE: 55.0}
    return run


def listing() -> Json:
    """Several runs."""
    every = [
        healthy(),
        recovering() | {"run": "gpt-small-09"},
        straggling(),
        large() | {"state_s": 86_400.0 * 3},
        failed(),
    ]
    ended = healthy(run="resnet-baseline", state="succeeded", state_s=200_000.0, world_size=0, nodes=[], incidents=[])
    return {
        "runs": [_summary(run) for run in [*every, ended]],
        "store": {"connected": True, "age_s": 0.4},
        "wall": WALL,
    }


def _summary(run: Json) -> Json:
    names = ("run", "state", "state_s", "step", "loss", "round", "world_size", "min_nodes", "max_nodes", "goodput")
    return {name: run[name] for name in names} | {
        "nodes": len(run["nodes"]),
        "stragglers": sum(each["straggler"] for of in run["nodes"] for each in of["ranks"]),
        "last_incident": run["incidents"][0] if run["incidents"] else None,
        "attention": run.get("attention", []),
    }


SMALL = {each.__name__: each for each in (healthy, recovering, straggling, failed, empty, nulls, hostile)}
"""By name, those that a test can go through quickly."""
