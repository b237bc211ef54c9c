"""Numbers in the manifests agree with each other, with ``settings`` and with the other places that say them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic_trainer.errors import ConfigError
from elastic_trainer.training.loading import load_job
from elastic_trainer.training.task import find_task
from tests.support.agreement import RULES, Training, disagreements
from tests.support.deployment import ROOT
from tests.support.manifests import (
    K8S,
    jobs,
    named,
    of_kind,
    rendered,
    rendered_text,
    settings_of,
)

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


SPOILED: list[tuple[str, str, str]] = [
    # what somebody might write instead, in the rendered Job, and the rule that tells
    ("--nnodes=1:4", "--nnodes=3:4", "it_may_shrink_and_grow"),
    ("--nnodes=1:4", "--nnodes=0:1", "it_may_shrink_and_grow"),
    ("maxFailedIndexes: 1", "maxFailedIndexes: 0", "it_may_shrink_and_grow"),
    ("completions: 2", "completions: 3", "it_may_shrink_and_grow"),
    ("completionMode: Indexed", "completionMode: NonIndexed", "it_may_shrink_and_grow"),
    ("maxFailedIndexes: 1", "maxFailedIndexes: 2", "it_may_shrink_and_grow"),
    ("backoffLimitPerIndex: 5", "backoffLimitPerIndex: 0", "it_may_shrink_and_grow"),
    ("backoffLimitPerIndex: 5", "backoffLimitPerIndex: 5\n  backoffLimit: 6", "it_may_shrink_and_grow"),
    ("podReplacementPolicy: Failed", "podReplacementPolicy: TerminatingOrFailed", "it_may_shrink_and_grow"),
    ("restartPolicy: Never", "restartPolicy: OnFailure", "it_may_shrink_and_grow"),
    ("succeededCount: 1", "succeededCount: 2", "one_pod_that_is_done_says_it_for_all"),
    ('status: "True"', "status: True", "exit_codes_mean_what_the_package_says"),
    ("- 143", "- 137", "exit_codes_mean_what_the_package_says"),
    ("- 78", "- 71", "exit_codes_mean_what_the_package_says"),
    ("containerName: trainer", "containerName: train", "exit_codes_mean_what_the_package_says"),
    ("action: FailJob", "action: FailIndex", "exit_codes_mean_what_the_package_says"),
    ("--shutdown-timeout=60", "--shutdown-timeout=30", "there_is_time_to_leave"),
    ("--shutdown-timeout=60", "--shutdown-timeout=90", "there_is_time_to_leave"),
    ("GracePeriodSeconds: 90", "GracePeriodSeconds: 60", "there_is_time_to_leave"),
    ("connect_timeout=120", "connect_timeout=200", "there_is_time_to_start"),
    ("connect_timeout=120", "connect_timeout=15", "there_is_time_to_start"),
    ("connect_timeout=120", "connect_timeout=120,preflight=warn", "there_is_time_to_start"),
    ("failureThreshold: 60", "failureThreshold: 6", "there_is_time_to_start"),
    ("failureThreshold: 6\n", "failureThreshold: 1\n", "probes_ask_what_they_mean"),
    ("recovery=in_place,", "recovery=in_place,ttl=30,", "probes_ask_what_they_mean"),
    ("metrics_port=9471", "metrics_port=9472", "probes_ask_what_they_mean"),
    ("metrics_address=0.0.0.0", "metrics_address=127.0.0.1", "probes_ask_what_they_mean"),
    ("path: /readyz", "path: /healthz", "probes_ask_what_they_mean"),
    ("alive_file=/tmp/alive", "alive_file=/tmp/pulse", "probes_ask_what_they_mean"),
    ("find /tmp/alive", "find /tmp/life", "probes_ask_what_they_mean"),
    ("--max-restarts=100", "--max-restarts=0", "workers_and_threads_fit_the_machine"),
    ("sizeLimit: 1Gi\n", "sizeLimit: 512Mi\n", "workers_and_threads_fit_the_machine"),
    ("medium: Memory", "medium: HugePages", "workers_and_threads_fit_the_machine"),
    ("memory: 2Gi", "memory: 1Gi", "workers_and_threads_fit_the_machine"),
    ('name: NPROC_PER_NODE\n          value: "1"', 'name: NPROC_PER_NODE\n          value: "2"',
     "workers_and_threads_fit_the_machine"),
    ('cpu: "1"', 'cpu: "1"\n            nvidia.com/gpu: "8"', "workers_and_threads_fit_the_machine"),
    ("--rdzv-id=mnist", "--rdzv-id=digits", "the_run_is_named_alike_everywhere"),
    ("node_id=$(POD_NAME)", "node_id=mnist", "the_run_is_named_alike_everywhere"),
    ("interface=$(POD_IP)", "interface=0.0.0.0", "the_run_is_named_alike_everywhere"),
    ("--rdzv-backend=etcd3", "--rdzv-backend=c10d", "the_run_is_named_alike_everywhere"),
    ("- --single-child\n", "- --verbose\n", "torchrun_is_the_process_that_gets_signals"),
    ("name: POD_IP", "name: IP", "torchrun_is_the_process_that_gets_signals"),
    ("mountPath: /checkpoints", "mountPath: /data", "what_is_written_can_be_written"),
    ("/tmp\n          name: tmp\n", "/tmp\n          name: temp\n", "what_is_written_can_be_written"),
    ("value: /tmp/cache", "value: /cache", "what_is_written_can_be_written"),
    ("topologyKey: kubernetes.io/hostname", "topologyKey: zone", "pods_are_spread"),
    ("minAvailable: 1", "minAvailable: 50%", "drains_leave_the_minimum"),
    ("minAvailable: 1", "minAvailable: 2", "drains_leave_the_minimum"),
    ("minAvailable: 1", "maxUnavailable: 1", "drains_leave_the_minimum"),
    ("PodEvictionPolicy: AlwaysAllow", "PodEvictionPolicy: IfHealthyBudget", "drains_leave_the_minimum"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "rule"), SPOILED, ids=[f"{n}-{each[1]}" for n, each in enumerate(SPOILED)])
def test_a_spoiled_number_is_found(right: str, wrong: str, rule: str) -> None:
    """Each rule can fail, and it is the one that is about the spoiled thing."""
    text = rendered_text(K8S / "jobs/mnist")
    assert right in text
    objects = list(yaml.safe_load_all(text.replace(right, wrong)))
    job, budget = named(objects, "Job", "mnist"), named(objects, "PodDisruptionBudget", "mnist")
    found = disagreements(Training(job, settings_of(objects), budget))
    assert rule in {each.partition(":")[0] for each in found}, found


def test_every_rule_was_seen_to_fail() -> None:
    """A rule that nothing breaks might be one that looks at nothing."""
    elsewhere = {"variables_name_files_that_are_mounted"}  # below: it needs the variables of another overlay
    assert {rule.__name__ for rule in RULES} == {each[2] for each in SPOILED} | elsewhere


def test_a_job_without_the_parts_that_its_cluster_asks_for_is_found() -> None:
    """Variables of the production map in a Job whose overlay forgot certificates and password."""
    objects = rendered("jobs/mnist")
    settings = settings_of(rendered("overlays/production"))
    (job,) = jobs(objects)
    found = disagreements(Training(job, settings))
    assert len([each for each in found if each.startswith("variables_name_files_that_are_mounted")]) == 4


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


def test_a_job_that_cannot_be_loaded_is_found(tmp_path: Path) -> None:
    """The judgement above can fail."""
    file = tmp_path / "job.yaml"
    file.write_text(training("jobs/mnist").settings["mnist"]["job.yaml"].replace("epochs:", "epoch:"), encoding="utf-8")
    with pytest.raises(ConfigError, match="epoch"):
        load_job(str(file))


def test_the_job_of_production_is_the_ready_made_one() -> None:
    """gpt2 as it is shipped, but for where its files lie and what it prints."""
    shipped = load_job("gpt2").model_dump()
    ours = load_job(str(ROOT / "k8s/jobs/gpt/gpt.yaml")).model_dump()
    differing = {key for key in shipped if shipped[key] != ours[key]}
    assert differing == {"compile", "checkpoint", "data", "logging"}
    assert ours["data"] == shipped["data"] | {"files": "/data/train.bin", "validation_files": "/data/val.bin"}


def test_the_script_in_the_map_is_the_one_that_is_tested() -> None:
    """`jobs/script/train.py` is the annotated script of the package, which trains in other tests."""
    ours = settings_of(rendered("jobs/script"))["script"]["train.py"]
    assert ours == (ROOT / "elastic_trainer/tasks/scripts/session_script.py").read_text(encoding="utf-8")


def test_the_dev_job_can_grow_to_four() -> None:
    """`kubectl patch` to four pods and back to three stays within the limits of the dev job."""
    it = training("overlays/dev")
    assert it.nodes == (1, 4)
    assert it.spec["parallelism"] == 2
    assert "k8s scale mnist 4" in (ROOT / "k8s/README.md").read_text(encoding="utf-8")
