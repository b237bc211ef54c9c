"""A run as the page, the commands and other programs see it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import GONE, LogTail, NodeLoad, NodeState, RoundState, Saved
from elastic_trainer.model import Cause
from elastic_trainer.monitor.snapshot import (
    MOST_NAMES,
    LastRound,
    StoreStatus,
    as_json,
    as_values,
    listing,
    rounds,
    snapshot,
    summary,
)
from elastic_trainer.monitor.state import Observed
from tests.support.monitored import entry, grouped, health, incident, rank, record, run

SEEN = Observed(now=100.0, wall=5000.0, state="training", arrived={"n0": 97.5})
CONTRACT = {
    *("run", "state", "state_s", "epoch", "min_nodes", "max_nodes", "recovery", "round", "round_reason", "world_size"),
    *("step", "loss", "samples", "samples_per_s", "goodput", "seconds", "checkpoint", "limits", "nodes", "rounds"),
    *("incidents", "curves"),
}


def test_the_fields_are_those_of_the_contract() -> None:
    """The status page is written against them; there may be more."""
    values = json.loads(as_json(snapshot(run(), SEEN)))
    assert set(values) >= CONTRACT
    assert set(values["nodes"][0]) == {
        *("node", "host", "state", "in_round", "group", "place", "metrics", "age_s", "ranks", "load", "tails")
    }
    assert set(values["nodes"][0]["ranks"][0]) >= {
        *("rank", "local_rank", "pid", "phase", "phase_s", "still_s", "step", "step_s", "compute_s", "device"),
        *("slowdown", "straggler"),
    }
    assert set(values["curves"]) == {"wall", "step", "loss", "step_s", "world_size"}
    row = json.loads(as_json(listing([summary(run(), SEEN)], StoreStatus(True, 0.0), 5000.0)))
    assert set(row) == {"runs", "store", "wall"}
    wanted = {"run", "state", "step", "world_size", "min_nodes", "max_nodes", "goodput", "loss", "last_incident"}
    assert set(row["runs"][0]) >= wanted


def test_without_health_documents_ranks_are_those_of_the_round() -> None:
    """Numbers and nodes are right from the round and the keys alone; the rest is not known."""
    told = snapshot(run(2, 2), SEEN)
    assert [(node.node, [each["rank"] for each in node.ranks]) for node in told.nodes] == [
        ("n0", [0, 1]),
        ("n1", [2, 3]),
    ]
    assert all(node.in_round for node in told.nodes)
    assert (told.world_size, told.round, told.min_nodes, told.max_nodes) == (4, 1, 1, 4)
    assert {each["phase"] for node in told.nodes for each in node.ranks} == {None}
    assert (told.step, told.loss, told.goodput, told.checkpoint) == (None, None, None, None)
    assert [node.age_s for node in told.nodes] == [2.5, None]  # since its document arrived


def test_nodes_of_shard_groups_have_a_group_and_a_place() -> None:
    """A spare has a place alone; so has nobody where each node holds a whole model."""
    told = snapshot(grouped(), SEEN)
    assert [(node.group, node.place) for node in told.nodes] == [(0, 0), (0, 1), (1, 0), (1, 1), (None, 0)]
    assert (told.shard_nodes, told.shard_groups) == (2, 2)
    assert {(node.group, node.place) for node in snapshot(run(2, 2), SEEN).nodes} == {(None, None)}


def test_a_newcomer_has_no_rank_and_a_lost_member_is_gone() -> None:
    """Members come first, by rank; then those without; then members whose key is not there. What was written a round
    ago has old numbers; a rank of which nothing is told is there all the same."""
    documents = run(3, 1)
    nodes = {"n9": NodeView("n9", 50, 50, record(1, state=NodeState.WARMING)), **documents.nodes}
    del nodes["n1"]
    told = snapshot(run(3, 1, nodes=nodes, health={"n9": health("n9", [rank(0)])}), SEEN).nodes
    assert [(node.node, node.state, node.in_round) for node in told] == [
        ("n0", "ready", True),
        ("n2", "ready", True),
        ("n9", "warming", False),
        ("n1", "gone", True),
    ]
    assert [each["rank"] for node in told for each in node.ranks] == [0, 2, None, 1]
    n1 = snapshot(run(2, 2, health={"n1": health("n1", [rank(5, 1, phase="checkpoint", pid=77)])}), SEEN).nodes[1]
    assert [(each["rank"], each["phase"], each["pid"]) for each in n1.ranks] == [(2, None, None), (3, "checkpoint", 77)]


def test_the_last_lines_of_a_node_that_is_gone_are_kept() -> None:
    """They say how it died; how busy its machine was is old news."""
    load = NodeLoad(cpu=0.5, cpus=8, used_bytes=3, total_bytes=4)
    tails = (LogTail(ranks=(1,), file="/logs/n1", lines=("out of memory",)),)
    documents = run(2, 1, health={name: health(name, load=load, tails=tails) for name in ("n0", "n1")})
    nodes = {"n0": documents.nodes["n0"]}
    told = {each.node: each for each in snapshot(replace(documents, nodes=nodes), SEEN).nodes}
    assert (told["n1"].state, told["n1"].tails, told["n1"].load) == ("gone", told["n0"].tails, None)
    assert told["n1"].tails == ({"ranks": [1], "file": "/logs/n1", "lines": ["out of memory"]},)
    assert told["n0"].load == load.model_dump(mode="json")
    lost = replace(documents, nodes=nodes, incidents=(incident(1),))
    assert snapshot(lost, SEEN).last_lines == ({"node": "n1", **told["n1"].tails[0]},)
    assert snapshot(replace(lost, nodes=documents.nodes), SEEN).last_lines == ()


def test_stragglers_are_marked_among_the_ranks_of_the_round() -> None:
    """With how much slower they are; a newcomer's leftovers do not count."""
    told = {
        "n0": health("n0", [rank(0, 0), rank(1, 1)]),
        "n1": health("n1", [rank(2, 0, compute_s=0.25), rank(3, 1)]),
        "n9": health("n9", [rank(0, 0, compute_s=9.0)]),
    }
    documents = run(2, 2, health=told)
    ranks = [each for node in snapshot(documents, SEEN).nodes for each in node.ranks]
    assert [each["straggler"] for each in ranks] == [False, False, True, False]
    assert ranks[2]["slowdown"] == pytest.approx(2.5)
    assert summary(documents, SEEN).stragglers == 1


def test_counts_add_up_all_nodes_that_ever_published_any() -> None:
    """Goodput, seconds and samples hold those of nodes that are gone."""
    told = {
        "n0": health("n0", counters={"seconds.training": 80.0, "seconds.data": 10.0, "samples": 100.0}),
        "n7": health("n7", counters={"seconds.training": 5.0, "samples": 50.0}),
        GONE: health(GONE, counters={"seconds.repeated": 5.0}),
    }
    values = snapshot(run(health=told), SEEN)
    assert values.goodput == pytest.approx(0.85)
    assert values.seconds["training"] == 85.0
    assert values.seconds["waiting"] == 0.0
    assert values.samples == 150


def test_the_checkpoint_is_that_of_rank_0_s_node() -> None:
    """An earlier first node's last one may be further, but has been left behind; without rank 0's, the furthest."""
    saved = {"n0": Saved(step=8, wall=1.0, bytes=5), "n1": Saved(step=9, wall=1.0)}
    told = {
        name: health(name, counters={"save.ok": 2.0}, saved=each, save_interval_s=60.0) for name, each in saved.items()
    }
    found = snapshot(run(health=told), Observed(saved_s=12.0)).checkpoint
    assert found is not None
    assert (found.step, found.bytes, found.age_s, found.interval_s, found.saved) == (8, 5, 12.0, 60.0, 4)
    told["n0"] = health("n0")
    other = snapshot(run(health=told), SEEN).checkpoint
    assert other is not None
    assert (other.step, other.interval_s) == (9, 60.0)


def test_incidents_come_newest_first_and_transitions_newest_last() -> None:
    """At most a hundred, with their totals; at most two hundred, the old ones without names in a large run: else they
    would be megabytes, each second."""
    documents = run(
        incidents=tuple(incident(number, detect_s=0.4) for number in range(150)),
        journal=tuple(entry(number) for number in range(250)),
    )
    values = as_values(snapshot(documents, SEEN))
    assert [each["round"] for each in values["incidents"]] == list(range(149, 49, -1))
    assert values["incidents"][0]["total_s"] == pytest.approx(0.48)
    assert values["incidents"][0]["cause"] == "worker_lost"
    assert [each["number"] for each in values["rounds"]] == list(range(50, 250))
    assert summary(documents, SEEN).last_incident == values["incidents"][0]
    names = tuple(f"node-{i}" for i in range(1000))
    told = rounds([entry(number, nodes=names, world_size=8000) for number in range(10)])
    assert sum(len(each.nodes) for each in told) == MOST_NAMES
    assert (len(told[-1].nodes), told[0].nodes, told[0].world_size) == (1000, (), 8000)


def test_numbers_that_are_not_finite_become_null() -> None:
    """JSON has none, and a browser would refuse the whole document."""
    progress = Progress(round=1, step=3, epoch=0, samples=1, loss=math.nan)
    told = {"n0": health("n0", [rank(0, compute_s=math.inf)])}
    text = as_json(snapshot(run(progress=progress, health=told), SEEN))
    values = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert values["loss"] is None
    assert values["nodes"][0]["ranks"][0]["compute_s"] is None


def test_one_fault_is_one_incident_and_planned_changes_are_none() -> None:
    """Why a worker died goes into the end of its round, and the newest is the one that began last, whoever wrote it
    first. A death that ended no round stays."""
    died: dict[str, Any] = {"kind": "worker_died", "cause": None}
    documents = run(
        incidents=(
            incident(7, wall=1010.0, reason="n1 is gone"),
            incident(7, wall=1000.0, kind="straggler", cause=None),
            incident(7, wall=1011.0, reason="worker 0 was killed", **died),
            incident(9, wall=1030.0, reason="ValueError", **died),
            incident(8, wall=1040.0, cause=Cause.NODE_JOINED),
        )
    )
    told = snapshot(documents, SEEN).incidents
    assert [(each["round"], each["kind"], each["planned"]) for each in told] == [
        (8, "round", True),
        (9, "worker_died", False),
        (7, "round", False),
        (7, "straggler", False),
    ]
    assert told[2]["reason"] == "n1 is gone; worker 0 was killed"
    assert summary(documents, SEEN).last_incident == told[1]


def test_a_run_that_has_ended_keeps_who_trained_last_and_how_long_it_took() -> None:
    """How long it took is known as far as its journal goes back."""
    journal = (entry(1, wall=1000.0), entry(1, RoundState.BROKEN, wall=1050.0), entry(2, wall=1060.0, nodes=("a", "b")))
    closed = run(0, state=RoundState.CLOSED, journal=(*journal, entry(2, RoundState.CLOSED, wall=1100.0)))
    ended = replace(SEEN, state="succeeded")
    assert snapshot(closed, ended).last == summary(closed, ended).last == LastRound(2, 2, 2, 100.0)
    assert snapshot(replace(closed, journal=closed.journal[2:]), ended).last == LastRound(2, 2, 2, None)
    assert snapshot(run(journal=journal), SEEN).last is None
