"""A run all of whose nodes die at once: who comes next records it, and a run that was stopped is no fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.cli.main import main
from tests.drills.endings.job import Job


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
