"""Numbers in the manifests agree with each other, with ``settings`` and with the other places that say them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.task import find_task
from tests.support.agreement import Training, disagreements
from tests.support.manifests import jobs, of_kind, rendered, settings_of

TRAINED = ("jobs/mnist", "jobs/gpt", "jobs/script", "overlays/dev", "overlays/production-gpt")
ALL_TRAINED = (*TRAINED, "examples/jobset", "examples/kubeflow")


def training(folder: str) -> Training:
    """The one Job of ``folder`` with what belongs to it."""
    objects = rendered(folder)
    (job,) = jobs(objects)
    settings = settings_of(objects)
    if folder == "overlays/production-gpt":
        settings |= {"elastic-trainer": settings_of(rendered("overlays/production"))["elastic-trainer"]}
    for each in of_kind(objects, "TrainJob"):  # the operator gives what it says to the runtime's only container
        job["spec"]["template"]["spec"]["containers"][0]["args"] = each["spec"]["trainer"]["args"]
        job["spec"]["parallelism"] = each["spec"]["trainer"]["numNodes"]
    budgets = of_kind(objects, "PodDisruptionBudget")
    return Training(job, settings, budgets[0] if budgets else None)


@pytest.mark.parametrize("folder", ALL_TRAINED)
def test_a_job_agrees_with_itself_and_with_the_package(folder: str) -> None:
    """All rules of tests/support/agreement, for every Job that somebody may apply."""
    it = training(folder)
    assert disagreements(it) == []
    assert (it.budget is not None) is (folder in TRAINED)


@pytest.mark.parametrize("folder", TRAINED)
def test_the_job_in_the_map_can_be_loaded_and_saves_where_all_pods_see_it(folder: str, tmp_path: Path) -> None:
    """`elastic_trainer.training` takes the YAML, and its checkpoints lie on the volume, by the run's name."""
    it = training(folder)
    if it.torchrun.training_script == "/etc/elastic-trainer/train.py":
        assert it.torchrun.training_script_args == [f"--directory=/checkpoints/{it.torchrun.rdzv_id}"]
        return
    assert it.trainer.command[-3:] == ["-m", "elastic_trainer.training", "/etc/elastic-trainer/job.yaml"]
    file = tmp_path / "job.yaml"
    file.write_text(it.settings[it.volume("job")["configMap"]["name"]]["job.yaml"], encoding="utf-8")
    config = load_job(str(file))
    find_task(config.task)(config)  # which checks its own part
    assert config.checkpoint.directory == f"/checkpoints/{it.torchrun.rdzv_id}"
    assert not config.compile  # the image has no compiler
    files = [str(value) for value in config.data.values() if str(value).startswith("/")]
    mounts = [mount["mountPath"] for mount in it.trainer.manifest["volumeMounts"]]
    assert all(any(each.startswith(f"{mount}/") for mount in mounts) for each in files)
