"""``--rdzv-conf preflight=...`` in a cluster of real torchruns: sick nodes stay out, or join with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_UNFIT
from elastic_trainer.membership.documents import Incident
from tests.support.plainjob import LIMIT_S, PlainJob

UNUSABLE = "/proc/checkpoints"
"""Not even root can write there."""


def checked(job: PlainJob, directory: str) -> dict[str, str]:
    return {**job.spec.options, "preflight_dir": directory}


def incidents(job: PlainJob) -> list[Incident]:
    items = job.store.range(job.keys.incidents, Deadline.after(LIMIT_S)).items
    return [found for item in items if (found := Incident.decode(item.value, item.key)).kind == "node_unfit"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("recovery", ["restart", "in_place"])
def test_a_sick_node_is_refused_and_the_others_train(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """It ends with a sentence and a status of its own, and was never a node of the run."""
    options = {"preflight": "refuse", "last_call": "2", "recovery": recovery}
    with PlainJob(tmp_path / "job", etcd_endpoint, run_id, flags=["--alone"], options=options) as job:
        sick = job.add_with(options=checked(job, UNUSABLE))
        assert job.exit_code(sick) == EXIT_UNFIT, job.describe()
        said = [line for line in job.log(sick.name).splitlines() if line.startswith("elastic-trainer: ")]
        assert len(said) == 1
        assert f"node {sick.name} is not fit: disk: {UNUSABLE}" in said[0]
        assert "Traceback" not in job.log(sick.name)
        assert not job.present(sick.name)
        (incident,) = incidents(job)
        assert incident.nodes == (sick.name,)
        if recovery == "in_place":
            return  # the plain script opens no Session
        well = [job.add_with(options=checked(job, str(tmp_path))) for _ in range(2)]
        order = job.await_order()
        assert sorted(order) == sorted(node.name for node in well)
        job.await_world(*order)
        assert job.finish() == {sick.name: EXIT_UNFIT} | dict.fromkeys(order, 0)


@pytest.mark.timeout(300)
def test_a_sick_node_joins_with_a_warning(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """It is logged with each finding, and an incident tells people; with the real measurements of torch."""
    options = {"preflight": "warn", "preflight_dir": UNUSABLE, "preflight_ratio": "0.01"}
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=1, flags=["--alone"], options=options) as job:
        node = job.add()
        job.await_world(node.name)
        log = job.log(node.name)
        assert '"event": "node.unfit"' in log
        assert '"event": "preflight.finished"' in log
        (incident,) = incidents(job)
        assert "it joins anyway" in incident.reason
        assert job.finish() == {node.name: 0}
