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
from tests.support.manifests import K8S, RENDERED, named, rendered, settings_of

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
