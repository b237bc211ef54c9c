"""Nodes in containers, as the pages start them: killed, cut off, paused, stopped, out of memory. The others train on.

The tests of one fleet are played in this order, and each leaves three nodes that train.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.clock import SYSTEM
from elastic_trainer.drills.measure import sample_problems
from elastic_trainer.local.ledger import LineKind
from tests.drills.containers import hoarding
from tests.drills.containers.fleet import ALL, FOLDER, SAMPLES, Composed, Fleet, digits, say


@pytest.fixture(scope="module")
def fleet(composed: Composed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three nodes that train digits for longer than all faults take."""
    job = digits("digits", 100_000)
    with Fleet(composed, "digits", tmp_path_factory.mktemp("digits"), job) as fleet:
        say("three containers start to train digits")
        fleet.start(*ALL)
        fleet.settled(*ALL)
        yield fleet


def test_compose_starts_what_watches(composed: Composed) -> None:
    """Its services are healthy, and their ports answer on the loopback of the engine's host."""
    assert all(map(composed.healthy, composed.services))
    assert "elastic_trainer" in composed.asked("http://127.0.0.1:9470/metrics")
    if "prometheus" in composed.services:
        rules = json.loads(composed.asked("http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
        assert {"alerting", "recording"} <= {rule["type"] for group in rules for rule in group["rules"]}


def test_a_container_that_is_killed_costs_no_committed_step(fleet: Fleet) -> None:
    """The others go on in the same processes; started again, it joins."""
    before = fleet.settled(*ALL)
    fleet.aftermath(before, "docker kill n2", fleet.kill("n2"), "n2")
    fleet.engine.docker("start", "n2")
    after = fleet.settled(*ALL)
    assert after.pids["n2"] != before.pids["n2"]


def test_a_container_without_its_network_comes_back_with_it(fleet: Fleet) -> None:
    """``docker network disconnect``: the others go on; after ``connect`` the same process trains with them."""
    before, network, t = fleet.settled(*ALL), fleet.composed.network, SYSTEM.monotonic()
    fleet.engine.docker("network", "disconnect", network, "n1")
    assert not fleet.engine.inspect("n1")["NetworkSettings"]["Networks"]
    fleet.aftermath(before, "docker network disconnect n1", t, "n1")
    assert fleet.settled("n0", "n2").round > before.round
    fleet.engine.docker("network", "connect", network, "n1")
    assert fleet.settled(*ALL).pids == before.pids


def test_a_container_that_is_paused_comes_back_as_it_was(fleet: Fleet) -> None:
    """``docker pause`` freezes all its processes: the others go on; thawed, the same process trains with them."""
    before, t = fleet.settled(*ALL), SYSTEM.monotonic()
    fleet.engine.docker("pause", "n1")
    assert fleet.state("n1")["Paused"]
    fleet.aftermath(before, "docker pause n1", t, "n1")
    fleet.settled("n0", "n2")
    fleet.engine.docker("unpause", "n1")
    assert fleet.settled(*ALL).pids == before.pids


def test_a_container_that_is_stopped_leaves_by_plan(fleet: Fleet) -> None:
    """Exit code 143, no round is broken, no step is made twice; started again, it joins."""
    before, broken, t = fleet.settled(*ALL), fleet.events().count(" broken "), SYSTEM.monotonic()
    fleet.stop("n2")
    fleet.aftermath(before, "docker stop n2", t, "n2")
    events = fleet.events()
    assert events.count(" broken ") == broken, events
    assert "n2" in next(line for line in reversed(events.splitlines()) if " leaves" in line)
    fleet.engine.docker("start", "n2")
    fleet.settled(*ALL)


def test_a_worker_beyond_the_memory_limit_is_killed_and_the_cause_is_named(fleet: Fleet) -> None:
    """The kernel kills it in its container, which runs on: its node says why, and starts another worker."""
    fleet.stop("n2")
    fleet.remove("n2")
    fleet.settled("n0", "n1")
    asked = f"{FOLDER}/hoard"
    script = ["--volume", f"{hoarding.__file__}:/job/hoarding.py:ro"]
    limit = ["--memory=1200m", "--memory-swap=1200m"]
    fleet.start("n2", options=[*script, *limit], job=("/job/hoarding.py", asked, *fleet.job[2:]))
    before, t = fleet.settled(*ALL), SYSTEM.monotonic()
    (fleet.folder / "hoard").touch()
    fleet.aftermath(before, "n2 out of memory", t, "n2")
    after = fleet.settled(*ALL)
    assert after.pids["n2"] != before.pids["n2"]
    assert fleet.engine.inspect("n2")["RestartCount"] == 0
    assert "because its cgroup was out of memory" in fleet.engine.log("n2")
    assert "because its cgroup was out of memory" in fleet.events()


def test_a_container_that_the_engine_restarts_joins_by_itself(fleet: Fleet) -> None:
    """``--restart always``: its first process dies, the engine starts it again, nobody else does anything."""
    fleet.engine.docker("update", "--restart=always", "n1")
    before, t = fleet.settled(*ALL), SYSTEM.monotonic()
    first = fleet.state("n1")["Pid"]
    helper = ("run", "--rm", "--pid=host", "local/base:1")
    fleet.engine.docker(*helper, "sh", "-c", f"kill -9 {first}")
    fleet.aftermath(before, "process 1 of n1 killed", t, "n1")
    after = fleet.settled(*ALL)
    assert fleet.engine.inspect("n1")["RestartCount"] == 1
    assert after.pids["n1"] != before.pids["n1"]
    fleet.engine.docker("update", "--restart=on-failure", "n1")


def test_a_node_runs_as_the_page_says(fleet: Fleet) -> None:
    """Nothing can be written but volumes and /tmp, no capability is there, and it is healthy by its own check."""
    host = fleet.engine.inspect("n0")["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    status = fleet.engine.docker("exec", "n0", "grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/1/status").split()
    assert [int(word, 16) for word in status[1::2]] == [0, 0, 1]
    addresses = [fleet.engine.inspect(name)["NetworkSettings"]["Networks"] for name in ALL]
    assert all(each[fleet.composed.network]["IPAddress"] for each in addresses)
    fleet.until(lambda: fleet.state("n0")["Health"]["Status"] == "healthy", "the health of n0")


def test_what_watches_has_seen_all_nodes(fleet: Fleet) -> None:
    """Prometheus finds the nodes by the monitor, and reaches them; the monitor knows the run."""
    fleet.settled(*ALL)
    status = fleet.composed.told("status", "digits")
    assert all(name in status for name in ALL), status
    if "prometheus" in fleet.composed.services:
        fleet.until(lambda: len(_scraped(fleet.composed, "digits")) == len(ALL), "three nodes that are scraped")


def _scraped(composed: Composed, run: str) -> list[Any]:
    query = f"http://127.0.0.1:9090/api/v1/query?query=up{{run=%22{run}%22}}==1"
    return list(json.loads(composed.asked(query))["data"]["result"])


def test_all_leave_and_others_finish_the_job(fleet: Fleet) -> None:
    """New containers resume behind the last step from the volume, end with 0, and each sample was used exactly once."""
    before = fleet.settled(*ALL)
    fleet.stop(*ALL)
    assert fleet.look() is not None
    reached = max(line.step for line in fleet.book.lines if line.round >= before.round)
    epoch = max(line.epoch for line in fleet.book.lines)
    fleet.remove(*ALL)
    say(f"all have left at step {reached}; three new containers finish two more epochs")
    fleet.start(*ALL, job=digits("digits", epoch + 3, "checkpoint.allow_changed=[length]"))
    assert [fleet.code(name) for name in ALL] == [0, 0, 0], fleet.describe()
    last = fleet.look()
    assert last is not None
    lives = set(last.pids.values())
    steps = [line for line in fleet.book.lines if line.pid in lives and line.event is LineKind.STEP]
    assert min(line.step for line in steps) == reached + 1
    assert sample_problems(fleet.book.lines, SAMPLES) == []


def test_a_run_grows_from_one_node_and_again_after_it_was_down_to_one(composed: Composed, tmp_path: Path) -> None:
    """With ``--nnodes 1:3`` on a network above 127.0.0.1, where what one node published of itself counts for all."""
    with Fleet(composed, "growing", tmp_path, digits("growing", 100_000)) as fleet:
        say("one container starts alone, two more join")
        fleet.start("n0")
        fleet.settled("n0")
        fleet.start("n1", "n2")
        before = fleet.settled(*ALL)
        t = fleet.kill("n1")
        fleet.kill("n2")
        fleet.aftermath(before, "docker kill of n1 and n2", t, "n1", "n2")
        fleet.settled("n0")
        fleet.engine.docker("start", "n1", "n2")
        assert fleet.settled(*ALL).pids["n0"] == before.pids["n0"]
        fleet.stop(*ALL)
        fleet.look()
        assert sample_problems(fleet.book.lines, SAMPLES) == []
