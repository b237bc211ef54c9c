"""A run that is left, or loses all nodes at once, says how: stopped on request, given up, lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_LEFT
from tests.drills.endings.job import Job


@pytest.mark.timeout(300)
def test_a_run_that_is_scaled_to_zero_is_stopped_and_comes_back(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM to all nodes is no fault. Started again it goes on where it was; killed, it is gathering, not stopped;
    and a node that waits in vain says that it gave up, with its exit code."""

    def status(command: str = "status") -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([command, run_id, "--endpoint", etcd_endpoint, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    def state() -> str:
        return str(status()[0]["state"])

    options = {"join_timeout": "20", "ttl": "4"}
    with Job(tmp_path, etcd_endpoint, run_id, most=2, options=options) as job:
        job.start(2)
        first = job.await_world("n0", "n1", count=5)
        stood = job.newest()
        for name in ("n0", "n1"):
            job.node(name).terminate()
        assert [job.exit_code(job.node(name)) for name in ("n0", "n1")] == [EXIT_LEFT, EXIT_LEFT]
        assert state() == "stopped"
        (stopped,) = [each for each in status("events") if each.get("kind") == "run_stopped"]
        assert stopped["reason"] == "the last node left on request: SIGTERM"

        job.start(2)
        job.await_world("n2", "n3", after=first)
        assert state() == "training"
        assert job.newest() > stood
        for name in ("n2", "n3"):
            job.node(name).kill()
        job.wait_for(lambda: state() == "gathering", "killed nodes are not missed")

        job.start(1)
        assert job.exit_code(job.node("n4")) == 1
        assert state() == "abandoned"
        (gave_up,) = [each for each in status("events") if each.get("kind") == "node_gave_up"]
        assert gave_up["reason"].startswith("node n4 gave up: fewer than 2 nodes were ready within 20 s")
        assert gave_up["reason"].endswith("(exit code 1)")


@pytest.mark.timeout(300)
def test_a_run_whose_only_node_is_killed_records_it_when_another_comes(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody was left to break the round: its document is as it was, and the next node closes what is missing."""
    with Job(tmp_path, etcd_endpoint, run_id, least=1, most=1) as job:
        (first,) = job.start(1)
        number = job.await_world("n0")
        assert first.kill() is not None
        before = job.document()
        assert (before.number, before.state.value) == (number, "active")
        (second,) = job.start(1)
        following = job.await_world("n1", after=number)
        second.terminate()
        job.exit_code(second)
        job.start(1)
        job.await_world("n2", after=following)

        def incidents() -> list[tuple[str, int, str, list[str], bool]]:
            capsys.readouterr()
            assert main(["events", run_id, "--endpoint", etcd_endpoint, "--json"]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            mine = [line for line in lines if line["type"] == "incident"]
            return [(each["kind"], each["round"], each["reason"], each["nodes"], each["open"]) for each in mine]

        expected = [
            ("round", number, f"all nodes of round {number} were lost", ["n0"], False),
            ("run_stopped", following, "the last node left on request: SIGTERM", ["n1"], False),
        ]
        job.wait_for(lambda: len(incidents()) >= len(expected), "the lost round is not recorded")
        job.await_steps(20)
        assert incidents() == expected
