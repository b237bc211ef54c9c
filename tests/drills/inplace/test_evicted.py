"""A machine that computes wrong results leaves the run that it was named in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from elastic_trainer.cli.main import main
from tests.drills.endings.job import LASTING, Job
from tests.drills.inplace.leading import ROOT, SCRIPTS
from tests.integration.training.launch import ran

SCRIPT = str(SCRIPTS / "auditing.py")
STEPS, LYING_RANK = "240", 2


def test_a_node_that_an_audit_names_is_let_go_and_the_others_train_on_as_if_it_had_never_lied(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves by a planned change: the others keep their processes, no step is lost, and none of its bits stays."""
    (directory := tmp_path / "job").mkdir()
    options = LASTING | {"evict_mismatched": "true"}
    words = [SCRIPT, str(directory / "result"), "deaf", STEPS, "0.05", f"8:activation:{LYING_RANK}"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with Job(directory, etcd_endpoint, run_id, entry=words, options=options, environment=environment) as job:
        job.start(3)
        hosts = 2 if job.hosts else 1  # of those who end
        job.await_world(*(node.name for node in job.nodes))
        job.wait_for(lambda: len(job.running) == 2, "nobody leaves")
        (gone,) = (node for node in job.nodes if not node.running)
        before = {node.name: node.worker(0) for node in job.running}
        left = job.await_world(*before)
        codes = job.finish()
        assert left > 0
        assert codes == {gone.name: 143} | dict.fromkeys(before, 0)
        assert '"node.evicted"' in job.log(gone.name)
        assert sum('"audit.mismatch"' in job.log(node.name) for node in job.nodes) == 1
        assert main(["events", run_id, "--endpoint", etcd_endpoint, "--json"]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"audit_mismatch"' in line]
        assert [each["nodes"] for each in events] == [[gone.name]]
        assert events[0]["reason"].endswith("its node was asked to leave")
        job.check_lossless()
        assert {line.rank for line in job.steps(gone.name)} == {LYING_RANK}
        assert len({line.pid for name in before for line in job.steps(name)}) == 2
    assert ran([SCRIPT, str(tmp_path / "result"), "alone", STEPS, "0"], ROOT).code == 0
    (honest,) = (torch.load(each) for each in tmp_path.glob("result-*"))
    results = list(directory.glob("result-*"))
    assert len({each.name.split("-")[1] for each in results}) == hosts, "a fork gives the name of another host"
    states = [torch.load(each) for each in results]
    assert len(states) == 2
    assert all(torch.equal(mine, other) for state in states for mine, other in zip(state, honest, strict=True))
