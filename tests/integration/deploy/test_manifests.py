"""The manifests of k8s/: valid for the API server, as closed as the strictest standard asks, made of parts that fit."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from itertools import combinations, permutations
from pathlib import Path

import kubernetes_validate
import pytest

from tests.support.deployment import ROOT, load
from tests.support.manifests import (
    EXAMPLES,
    JOBS,
    K8S,
    OVERLAYS,
    RENDERED,
    Manifest,
    combined,
    container,
    jobs,
    named,
    of_kind,
    pods,
    rendered,
    settings_of,
)
from tests.support.podsecurity import violations

OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version()
OPERATORS = ("monitoring.coreos.com", "cert-manager.io", "jobset.x-k8s.io", "trainer.kubeflow.org")
PLATFORM = ("etcd-ha", "tls", "auth", "networkpolicy")


def folders_with(name: str) -> set[str]:
    return {str(path.parent.relative_to(K8S)) for path in K8S.glob(f"**/{name}")}


def invalid(manifest: Manifest, version: str) -> list[str]:
    """What the API server of ``version`` would not accept; those of operators only a cluster can judge."""
    if manifest["apiVersion"].partition("/")[0] in OPERATORS:
        return []
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{manifest['kind']}: {error.message}"]
    return []


def test_everything_that_can_be_rendered_is_known_here() -> None:
    """No folder escapes the tests below: each is an overlay, a job, an example, a component or the base."""
    components = {folder for folder in folders_with("kustomization.yaml") if folder.startswith("components/")}
    assert folders_with("kustomization.yaml") == {*RENDERED, *components, "base"}
    used = {
        Path(part).name
        for name in OVERLAYS
        for part in load(K8S / "overlays" / name / "kustomization.yaml").get("components", ())
    }
    assert {f"components/{name}" for name in used | {"kueue"}} == components  # that one: test_render


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", RENDERED)
def test_the_api_server_accepts_what_is_rendered(folder: str, version: str) -> None:
    """Every object fits the strict schema of the oldest supported and of the newest known Kubernetes."""
    objects = rendered(folder)
    assert [problem for each in objects for problem in invalid(each, version)] == []
    assert [problem for each in jobs(objects) for problem in invalid(each, version)] == []
    names = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("folder", RENDERED)
def test_pods_satisfy_the_restricted_standard_and_have_no_token(folder: str) -> None:
    """What the namespace enforces, and beyond it: a read-only root, a numeric user, nothing of the API server's."""
    assert [f"{name}: {problem}" for name, pod in pods(rendered(folder)) for problem in violations(pod["spec"])] == []


@pytest.mark.parametrize(("age_s", "well"), [(0, True), (50, True), (70, False), (None, False)])
def test_the_probe_of_a_node_looks_at_the_age_of_its_file(age_s: int | None, well: bool, tmp_path: Path) -> None:
    """The command of the rendered probe, carried out: no port is asked, which strangers could fill."""
    job = named(rendered("jobs/mnist"), "Job", "mnist")
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert trainer["startupProbe"]["exec"] == trainer["livenessProbe"]["exec"]
    alive = tmp_path / "alive"
    if age_s is not None:
        alive.touch()
        os.utime(alive, (alive.stat().st_mtime - age_s,) * 2)
    words = [word.replace("/tmp/alive", str(alive)) for word in trainer["livenessProbe"]["exec"]["command"]]
    assert (subprocess.run(words, capture_output=True, check=False).returncode == 0) is well


def test_the_namespace_enforces_the_standard() -> None:
    """A pod added later is refused by the API server, not by a test here; accounts have no token either."""
    base = rendered("base")
    (namespace,) = of_kind(base, "Namespace")
    labels = namespace["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "warn", "audit")} == {"restricted"}
    (account,) = of_kind(base, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert {pod["spec"]["serviceAccountName"] for _, pod in pods(base)} == {account["metadata"]["name"]}


@pytest.mark.parametrize("folder", RENDERED)
def test_pods_run_as_the_user_of_the_image(folder: str) -> None:
    """The number in the Dockerfile, for the user, its group and the files of volumes."""
    found = re.search(r"^ARG UID=(\d+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    for name, pod in pods(rendered(folder)):
        context = pod["spec"]["securityContext"]
        users = {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")}
        assert users == {int(found[1])}, name


@pytest.mark.parametrize("chosen", [
    order for size in range(len(PLATFORM) + 1) for each in combinations(PLATFORM, size)
    for order in ([each] if size != 2 else permutations(each))
], ids=lambda each: "+".join(each) or "none")  # fmt: skip
def test_components_can_be_chosen_freely(chosen: tuple[str, ...], tmp_path: Path) -> None:
    """Each selection, pairs in both orders: objects are valid, and no variable is used before it has a value."""
    directory = tmp_path / "overlay"
    directory.mkdir()
    objects = combined(directory, ["base"], [f"components/{name}" for name in chosen])
    assert [problem for each in objects for problem in invalid(each, NEWEST)] == []
    settings = settings_of(objects)
    started = {name: container(pod, settings) for name, pod in pods(objects)}
    assert {name: each.unresolved for name, each in started.items()} == {name: [] for name in started}
    command = " ".join(started["StatefulSet/etcd"].command)
    assert ("https://" in command) is ("tls" in chosen)
    assert command.count(":2380,") == (2 if "etcd-ha" in chosen else 0)


@pytest.mark.parametrize("folder", RENDERED)
def test_variables_name_files_that_are_mounted(folder: str) -> None:
    """Certificates and passwords lie where the variables for all pods say, in the monitor as in the trainers."""
    objects = rendered(folder)
    settings = settings_of(rendered("overlays/production") if folder == "overlays/production-gpt" else objects)
    for name, pod in pods(objects):
        started = container(pod, settings)
        mounted = {mount["mountPath"] for mount in started.manifest["volumeMounts"]}
        files = {value for key, value in started.environment.items() if value.startswith("/etc/")}
        assert {str(Path(file).parent) for file in files} <= mounted, name
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())} | {"data"}
        assert {mount["name"] for mount in started.manifest["volumeMounts"]} <= volumes, name
        assert "production" not in folder or files, name


@pytest.mark.parametrize("folder", RENDERED)
def test_what_pods_refer_to_is_there(folder: str) -> None:
    """ConfigMaps, claims and accounts are in the overlay or in the base; `data` is what the page asks people for."""
    objects = [*rendered(folder), *rendered("base")]
    there = {(each["kind"], each["metadata"]["name"]) for each in objects} | {("PersistentVolumeClaim", "data")}
    for name, pod in pods(objects):
        spec = pod["spec"]
        named_here = {("ServiceAccount", spec["serviceAccountName"])}
        named_here |= {
            ("ConfigMap", source["configMapRef"]["name"])
            for each in spec["containers"]
            for source in each.get("envFrom", ())
        }
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                named_here.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                named_here.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        assert named_here <= there, name
    assert "`data`" in (K8S / "README.md").read_text(encoding="utf-8")


def test_the_certificates_of_the_example_are_those_that_are_mounted() -> None:
    """Names of Secrets, of hosts and of uses: what etcd's members call each other, and what clients call them."""
    certificates = {
        each["metadata"]["name"]: each["spec"] for each in of_kind(rendered("examples/cert-manager"), "Certificate")
    }
    made = {spec["secretName"] for spec in certificates.values() if not spec.get("isCA")}
    objects = rendered("overlays/production")
    mounted = {
        volume["secret"]["secretName"]
        for folder in ("overlays/production", "overlays/production-gpt")
        for _, pod in pods(rendered(folder))
        for volume in pod["spec"].get("volumes", ())
        if "secret" in volume
    }
    assert {name for name in mounted if name.endswith("-tls")} == made
    members = {f"etcd-{number}.etcd" for number in range(named(objects, "StatefulSet", "etcd")["spec"]["replicas"])}
    endpoint = settings_of(objects)["elastic-trainer"]["ELASTIC_TRAINER_ENDPOINT"]
    called = {part.rpartition(":")[0] for part in endpoint.split(",")}
    assert called == members
    assert {*members, "localhost", "etcd"} <= set(certificates["etcd-server-tls"]["dnsNames"])
    assert members <= set(certificates["etcd-peer-tls"]["dnsNames"])
    for name in ("etcd-server-tls", "etcd-peer-tls"):
        assert {"server auth", "client auth"} <= set(certificates[name]["usages"])
    assert "commonName" not in certificates["etcd-client-tls"]  # etcd would take it for a user
    started = container(named(objects, "StatefulSet", "etcd")["spec"]["template"], settings_of(objects))
    names = {name: spec.get("commonName") for name, spec in certificates.items()}
    allowed = started.environment["ETCD_PEER_CERT_ALLOWED_CN"]
    assert [name for name, common in names.items() if common == allowed] == ["etcd-peer-tls"]


def test_examples_train_as_the_job_does() -> None:
    """The pods of JobSet and TrainJob differ from those of the Job in names and in what is trained, in nothing else."""

    def essence(job: Manifest) -> Manifest:
        template = copy.deepcopy(job["spec"]["template"])
        spec, (trainer,) = template["spec"], template["spec"]["containers"]
        trainer["name"] = "trainer"
        trainer["command"] = [part for part in trainer["command"] if part.startswith("--") and "rdzv-id" not in part]
        trainer["env"] = [each for each in trainer["env"] if each["name"] != "RUN"]
        for holder, key in ((trainer, "volumeMounts"), (spec, "volumes")):
            holder[key] = [each for each in holder[key] if each["name"] != "job"]
        spec.pop("topologySpreadConstraints")
        policies = copy.deepcopy(
            {key: job["spec"][key] for key in ("podFailurePolicy", "successPolicy", "backoffLimitPerIndex")}
        )
        for rule in policies["podFailurePolicy"]["rules"]:
            rule.get("onExitCodes", {}).pop("containerName", None)
        return {"spec": spec, **policies}

    (own,) = jobs(rendered("jobs/mnist"))
    for example in ("jobset", "kubeflow"):
        (other,) = jobs(rendered(f"examples/{example}"))
        assert essence(other) == essence(own)
    assert set(EXAMPLES) == {"cert-manager", "jobset", "kubeflow"}
    assert set(JOBS) == {"mnist", "gpt", "script"}
