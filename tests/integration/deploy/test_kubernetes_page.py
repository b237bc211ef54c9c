"""The commands of k8s/README.md name what there is. Those of kubectl need a cluster: it is judged what they mean."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import kubernetes_validate
import pytest

from elastic_trainer.variables import ENV_ENDPOINT
from tests.support.agreement import Training, disagreements
from tests.support.commands import understand
from tests.support.deployment import ROOT
from tests.support.manifests import K8S, RENDERED, container, named, rendered, settings_of

PAGE = (K8S / "README.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
LINES = [line.partition(" #")[0].strip() for line in SHELL.splitlines() if line.partition(" #")[0].strip()]
PATCHES = sorted(set(re.findall(r"kubectl patch (\S+ \S+) --type=merge -p '(\{.*?\})'", FLAT)))


def merged(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        result[key] = merged(result.get(key), value)
    return result


def test_folders_that_are_applied_can_be_rendered() -> None:
    """Each ``-k`` is one of those that other tests judge, each ``-f`` a file."""
    folders = re.findall(r"kubectl (?:apply|delete|kustomize)(?: -k)? k8s/([\w/-]+)", PAGE)
    assert {"overlays/dev", "overlays/production", "overlays/production-gpt", "examples/cert-manager"} <= set(folders)
    assert set(folders) <= set(RENDERED)
    files = re.findall(r"-f (k8s/\S+)", PAGE)
    assert files
    assert all((ROOT / file).is_file() for file in files)


@pytest.mark.parametrize(("target", "patch"), PATCHES, ids=[patch for _, patch in PATCHES])
def test_a_patch_leaves_a_job_that_is_right(target: str, patch: str) -> None:
    """Sizes stay within the limits of the dev job, and what is patched are fields that exist."""
    assert target == "job mnist"
    objects = rendered("overlays/dev")
    job = merged(named(objects, "Job", "mnist"), json.loads(patch))
    assert job != named(objects, "Job", "mnist")
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    budget = named(objects, "PodDisruptionBudget", "mnist")
    assert disagreements(Training(job, settings_of(objects), budget)) == []


def test_both_patches_are_there() -> None:
    """Four nodes, and a pause."""
    assert len(PATCHES) == 2


def test_objects_and_ports_that_are_named_exist() -> None:
    """``exec``, ``wait``, ``logs`` and ``port-forward`` reach something in the overlay that the page has applied."""
    dev, production = rendered("overlays/dev"), rendered("overlays/production")
    monitor = container(named(dev, "Deployment", "monitor")["spec"]["template"], settings_of(dev))
    etcd = container(named(production, "StatefulSet", "etcd")["spec"]["template"], settings_of(production))
    assert "kubectl exec deploy/monitor -- elastic-trainer status mnist" in FLAT
    assert f"kubectl port-forward svc/monitor {monitor.ports['http']}" in FLAT
    assert f"kubectl port-forward pod/etcd-0 {etcd.ports['client']} &" in LINES
    assert "kubectl wait --for=condition=complete --timeout=1h job/mnist" in LINES
    labels = named(dev, "Job", "mnist")["spec"]["template"]["metadata"]["labels"]
    (selector,) = re.findall(r"kubectl logs -l (\S+)", FLAT)
    assert dict([selector.split("=")]).items() <= labels.items()
    spaces = {each["metadata"].get("namespace") for each in [*dev, *production] if each["kind"] == "Job"}
    assert set(re.findall(r"--namespace=(\S+)", PAGE)) == spaces == {"elastic-trainer"}


def test_commands_of_this_package_are_understood() -> None:
    """The real parsers take each ``elastic-trainer`` line, and settings know each variable."""
    commands = [line.partition("|")[0] for line in LINES if line.startswith("elastic-trainer ")]
    commands += re.findall(r"kubectl exec \S+ -- (elastic-trainer [\w -]+)", PAGE)
    assert len(commands) == 6
    for command in commands:
        understand(shlex.split(command))
    known = set(re.findall(r'"(ELASTIC_TRAINER_\w+)"', (ROOT / "elastic_trainer/variables.py").read_text("utf-8")))
    written = set(re.findall(r"ELASTIC_TRAINER_\w+", PAGE))
    rendered_too = {key for folder in RENDERED for key in settings_of(rendered(folder)).get("elastic-trainer", {})}
    assert ENV_ENDPOINT in written
    assert written | rendered_too <= known


def test_exit_codes_on_the_page_are_all_of_them() -> None:
    """The table says what becomes of a pod for each exit code that there is."""
    from elastic_trainer import errors

    table = PAGE.partition("| a pod ends with |")[2].partition("\n\n")[0]
    told = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert told == {0, *(getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_"))}
