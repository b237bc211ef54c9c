"""The manifests on a real API server, the one of kubectl's present context: ``make kube-test``.

Nothing is started: objects are dry runs, the one Job is suspended. All of it lies in a namespace of its own, which asks
for the restricted Pod Security Standard and is deleted at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Sequence

import pytest
import yaml

from elastic_trainer.cli.main import main
from tests.integration.deploy.test_render import SCRIPT, asked, objects_of
from tests.support.deployment import ROOT
from tests.support.manifests import RENDERED, Manifest, of_kind, rendered
from tests.support.requirements import needs, outside

LIMIT_S = 120.0
on_a_cluster = pytest.mark.skipif(
    os.environ.get("ELASTIC_TRAINER_KUBE_TEST") != "1",
    reason="asks an API server: make kube-test, or ELASTIC_TRAINER_KUBE_TEST=1",
)


def kubectl(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    program = needs("kubectl", "it asks the API server")
    command = [program, *words]
    with outside():
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def known_kinds() -> set[tuple[str, str]]:
    """``apiVersion`` and ``kind`` of all that the server knows."""
    asked = kubectl("api-resources", "--no-headers")
    assert asked.returncode == 0, asked.stderr
    rows = [line.split() for line in asked.stdout.splitlines() if line.strip()]
    return {(row[-3], row[-1]) for row in rows}


def refusals(objects: Sequence[Manifest], namespace: str) -> list[str]:
    """What the server says against ``objects``; those of operators that it does not have are left out."""
    kinds, said = known_kinds(), []
    for each in objects:
        if (each["apiVersion"], each["kind"]) not in kinds:
            continue
        if "namespace" in each["metadata"]:
            each["metadata"]["namespace"] = namespace
        words = ("apply", "--server-side", "--dry-run=server", "--validate=strict", f"--namespace={namespace}")
        done = kubectl(*words, "-f", "-", text=yaml.safe_dump(each))
        if done.returncode != 0 or "would violate PodSecurity" in done.stderr:
            said.append(f"{each['kind']} {each['metadata']['name']}: {done.stderr.strip()}")
    return said


def run_of(*words: str) -> list[Manifest]:
    return objects_of(asked("--name", "kube-test", "--image", "elastic-trainer:latest", *words, "--", SCRIPT))


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"elastic-trainer-test-{uuid.uuid4().hex[:8]}"
    levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": levels}}
    done = kubectl("create", "-f", "-", text=json.dumps(made))
    assert done.returncode == 0, done.stderr
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@on_a_cluster
@pytest.mark.parametrize("folder", RENDERED)
def test_the_server_accepts_each_folder(folder: str, namespace: str) -> None:
    assert refusals(rendered(folder), namespace) == []


@on_a_cluster
@pytest.mark.parametrize("nodes", ["1:1", "2:8", "2:64"])
@pytest.mark.parametrize("gpus", [(), ("--gpus", "8")])
def test_the_server_accepts_what_is_rendered(
    nodes: str, gpus: tuple[str, ...], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert refusals(run_of("--nodes", nodes, *gpus), namespace) == []


@on_a_cluster
def test_a_job_is_scaled_and_one_number_alone_is_refused(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, and by what k8s/README.md says."""
    monkeypatch.chdir(ROOT)
    objects = run_of("--nodes", "2:8", "--pods", "4")
    (job,) = of_kind(objects, "Job")
    job["spec"]["suspend"] = True
    job["metadata"].pop("namespace", None)
    where = f"--namespace={namespace}"
    made = kubectl("create", where, "--validate=strict", "-f", "-", text=yaml.safe_dump(job))
    assert made.returncode == 0, made.stderr
    name = job["metadata"]["name"]
    for pods in (6, 2):
        assert main(["k8s", "scale", name, str(pods), where]) == 0
        spec = json.loads(kubectl("get", where, "job", name, "--output=json").stdout)["spec"]
        assert (spec["parallelism"], spec["completions"], spec["maxFailedIndexes"]) == (pods, pods, pods - 2)
    alone = kubectl("patch", where, "job", name, "--type=merge", "-p", '{"spec":{"completions":5}}')
    assert alone.returncode != 0
