"""What ends a run in failure: a poison batch, collectives that never work. Each names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.membership.documents import RunResult
from tests.drills.endings.job import LASTING, SCRIPT, Job
from tests.drills.endings.train import BATCH, SAMPLES


@pytest.mark.timeout(500)
@pytest.mark.parametrize("recovery", ["in_place", "restart"])
def test_a_poison_batch_ends_the_run_and_is_named(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """One sample kills whoever computes it. After three failures at that step the run is closed as failed everywhere,
    and the reason names the step and the samples. In restart mode each life of the workers dies at the same step."""
    poison = int(EpochPlan(SAMPLES, BATCH).order(0)[3 * BATCH + 5])
    count = 3 if recovery == "in_place" else 2
    options = {"recovery": "restart"} | LASTING if recovery == "restart" else None
    with Job(tmp_path, etcd_endpoint, run_id, "--poison", str(poison), most=count, options=options) as job:
        job.start(count)
        assert job.exit_codes(limit_s=400) == {node.name: 1 for node in job.nodes}
        closed = job.closed()
        assert closed.result is RunResult.FAILED
        place = f"3 worker failures after step 3, without a step committed since (epoch 0, samples {3 * BATCH} to"
        assert closed.reason.startswith(f"{place} {4 * BATCH - 1} of its order): "), closed.reason
        for node in job.nodes:
            assert any(place in sentence for sentence in job.sentences(node.name)), job.log(node.name)
            if recovery == "in_place":
                assert "Traceback" not in job.log(node.name)
        assert job.newest() == 3


@pytest.mark.timeout(300)
def test_an_error_of_the_script_is_in_the_log_of_its_node(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """With its traceback, whatever the agent says to the worker meanwhile: who looks at night must see the reason.

    One node alone has nobody who lives on and knows how far it was: its page tells.
    """
    plan = EpochPlan(SAMPLES, BATCH)
    bad = int(plan.order(0)[3 * BATCH + 5])
    with Job(tmp_path, etcd_endpoint, run_id, "--bad", str(bad), least=1, most=2) as job:
        job.start(1)
        assert job.exit_codes() == {"n0": 1}
        assert "3 worker failures after step 3" in job.closed().reason
        logs = job.log("n0")
        assert logs.count("Traceback (most recent call last)") >= 3
        assert logs.count(f"ValueError: sample {bad} is bad") >= 3


STORAGE = f"""
import runpy, sys
from pathlib import Path
away = Path(sys.argv[1], "storage-is-away")
if away.exists():
    away.rename(away.with_name("storage-is-back"))
    sys.exit({EXIT_CONFIG})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_what_was_right_and_is_not_any_more_is_tried_again(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """A worker is lost, and the next one does not find its data before it opens its Session: status 78. The node has
    made steps with this very configuration, so it tries again, instead of failing the whole Job of all nodes."""
    script = tmp_path / "script.py"
    script.write_text(STORAGE)
    job_directory = tmp_path / "job"
    with Job(job_directory, etcd_endpoint, run_id, most=2, entry=[str(script), str(job_directory)]) as job:
        job.start(2)
        before = job.await_world("n0", "n1")
        job.tell("storage-is-away")
        assert job.nodes[0].kill_worker() is not None
        job.wait_for((job_directory / "storage-is-back").exists, "no worker was started again")
        job.await_world("n0", "n1", after=before)
        assert job.finish() == {"n0": 0, "n1": 0}
