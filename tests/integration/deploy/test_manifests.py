"""The manifests of k8s/: valid for the API server, closed, of parts that fit, in one piece with settings and pages."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, permutations
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from elastic_trainer.cli.main import main
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import AccessDeniedError, ElasticTrainerError
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.task import find_task
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.monitor.serve import DEFAULT_PORT
from elastic_trainer.settings import DEFAULT_ETCD_PORT, StoreSettings, rendezvous_options
from elastic_trainer.store import connect_checked
from elastic_trainer.variables import ENV_ENDPOINT
from elastic_trainer.web.server import HEALTH, READINESS
from tests.integration.store.support import put
from tests.support.agreement import Training, disagreements, quantity
from tests.support.commands import quiet, understand
from tests.support.connections import Pod, may_connect
from tests.support.deployment import DEPLOY, ROOT, load
from tests.support.dockerfile import arguments
from tests.support.manifests import (
    EXAMPLES,
    JOBS,
    K8S,
    OVERLAYS,
    RENDERED,
    Container,
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
from tests.support.platform import RenderedEtcd, status, variables
from tests.support.podsecurity import violations
from tests.support.prometheusrule import FILE as RULES_FILE
from tests.support.prometheusrule import text as rules_text
from tests.support.requirements import needs
from tests.support.waiting import eventually

OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version()
OPERATORS = ("monitoring.coreos.com", "cert-manager.io", "jobset.x-k8s.io", "trainer.kubeflow.org")
PLATFORM = ("etcd-ha", "tls", "auth", "networkpolicy")
PAGE = (K8S / "README.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
LINES = [line.partition(" #")[0].strip() for line in SHELL.splitlines() if line.partition(" #")[0].strip()]
PATCHES = sorted(set(re.findall(r"kubectl patch (\S+ \S+) --type=merge -p '(\{.*?\})'", FLAT)))


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
    assert {f"components/{name}" for name in used | {"kueue", "progress"}} == components  # of jobs by themselves


@pytest.mark.parametrize("folder", RENDERED)
def test_what_is_rendered_is_accepted_and_in_one_piece(folder: str) -> None:
    """By the strict schemas of the oldest supported and the newest known Kubernetes, and by Pod Security *restricted*.

    Pods run as the user of the image, without a token; what they refer to is in the folder or in the base (`data` is
    what the page asks people for); certificates and passwords lie where the variables for all pods say."""
    objects, base = rendered(folder), rendered("base")
    for version in (OLDEST, NEWEST):
        assert [problem for each in (*objects, *jobs(objects)) for problem in invalid(each, version)] == []
    names = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in objects]
    assert len(set(names)) == len(names)
    there = {(each["kind"], each["metadata"]["name"]) for each in (*objects, *base)} | {
        ("PersistentVolumeClaim", "data")
    }
    assert "`data`" in PAGE
    settings = settings_of(rendered("overlays/production") if folder == "overlays/production-gpt" else objects)
    for name, pod in pods(objects):
        spec, started = pod["spec"], container(pod, settings)
        assert violations(spec) == [], name
        context = spec["securityContext"]
        assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(arguments()["UID"])}, name
        assert referred(spec) <= there, name
        mounts = started.manifest["volumeMounts"]
        files = {value for key, value in started.environment.items() if value.startswith("/etc/")}
        assert {str(Path(file).parent) for file in files} <= {mount["mountPath"] for mount in mounts}, name
        volumes = {volume["name"] for volume in spec.get("volumes", ())} | {"data"}
        assert {mount["name"] for mount in mounts} <= volumes, name
        assert "production" not in folder or files, name


def referred(spec: Manifest) -> set[tuple[str, str]]:
    """Kind and name of all that a pod refers to."""
    found = {("ServiceAccount", spec["serviceAccountName"])}
    for source in (source for each in spec["containers"] for source in each.get("envFrom", ())):
        found.add(("ConfigMap", source["configMapRef"]["name"]))
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            found.add(("ConfigMap", volume["configMap"]["name"]))
        if "persistentVolumeClaim" in volume:
            found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    return found


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


def test_the_component_progress_gives_a_token_for_one_job_alone(tmp_path: Path) -> None:
    """The account that the Job had already may patch that Job, and the pod knows its name."""
    objects = combined(tmp_path, ["jobs/gpt"], ["components/progress"])
    assert [problem for each in objects for problem in invalid(each, NEWEST)] == []
    (job,), (role,) = of_kind(objects, "Job"), of_kind(objects, "Role")
    (rule,) = role["rules"]
    assert (rule["verbs"], rule["resources"], rule["resourceNames"]) == (["patch"], ["jobs"], ["gpt"])
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["metadata"]["name"] == binding["roleRef"]["name"] == role["metadata"]["name"] == "gpt-progress"
    assert [subject["name"] for subject in binding["subjects"]] == ["elastic-trainer"]
    pod = job["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("elastic-trainer", True)
    assert {"name": "ELASTIC_TRAINER_KUBE_JOB", "value": "gpt"} in pod["containers"][0]["env"]


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


TRAINED = ("jobs/mnist", "jobs/gpt", "jobs/script", "overlays/dev", "overlays/production-gpt")
ALL_TRAINED = (*TRAINED, "examples/jobset", "examples/kubeflow")


def training(folder: str) -> Training:
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


def option(etcd: Container, name: str) -> str:
    (found,) = [part for part in etcd.command if part.startswith(f"--{name}=")]
    return found.partition("=")[2]


@pytest.mark.parametrize("name", ["dev", "production"])
def test_etcd_forgets_restarts_and_is_judged_by_the_right_questions(name: str) -> None:
    """Compaction as on one machine; liveness asks for this member alone; all members start together."""
    workload = named(rendered(f"overlays/{name}"), "StatefulSet", "etcd")
    etcd = container(workload["spec"]["template"], {})
    compose = load(DEPLOY / "compose.yaml")["services"]["etcd"]["command"]
    compaction = [part for part in compose if "auto-compaction" in part]
    assert len(compaction) == 2
    assert set(compaction) <= set(etcd.command)
    for probe in ("startupProbe", "livenessProbe"):
        path, port = etcd.probe(probe)
        assert (path, port) == ("/health?serializable=true&exclude=NOSPACE", 2381)
    assert etcd.probe("readinessProbe") == ("/health?exclude=NOSPACE", 2381)
    assert etcd.patience_s("startupProbe") >= 180
    assert etcd.patience_s("livenessProbe") >= 60
    assert workload["spec"]["podManagementPolicy"] == "Parallel"
    mounts = {mount["name"]: mount["mountPath"] for mount in etcd.manifest["volumeMounts"]}
    assert option(etcd, "data-dir").startswith(f"{mounts['data']}/")
    (claim,) = workload["spec"]["volumeClaimTemplates"]
    room = quantity(claim["spec"]["resources"]["requests"]["storage"])
    quota = int(etcd.environment.get("ETCD_QUOTA_BACKEND_BYTES", 2 * 2**30))
    assert quota <= room / 2  # a defragmentation writes the database a second time


def test_three_members_are_kept_apart_and_two_of_them_up() -> None:
    """A disruption budget that is the majority, and one machine for each."""
    objects = rendered("overlays/production")
    spec = named(objects, "StatefulSet", "etcd")["spec"]
    budget = named(objects, "PodDisruptionBudget", "etcd")["spec"]
    assert budget["minAvailable"] == spec["replicas"] // 2 + 1 == 2
    labels = spec["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    (apart,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= labels.items()


def test_liveness_never_depends_on_others_and_readiness_does() -> None:
    """A node's is the time of a file, a monitor's the path that is well while it polls."""
    dev = rendered("overlays/dev")
    monitor = container(named(dev, "Deployment", "monitor")["spec"]["template"], settings_of(dev))
    node = container(named(dev, "Job", "mnist")["spec"]["template"], settings_of(dev))
    asked = [monitor.probe(f"{kind}Probe")[0] for kind in ("startup", "liveness", "readiness")]
    assert [*asked, node.probe("readinessProbe")[0]] == [HEALTH, HEALTH, READINESS, READINESS]
    assert all("exec" in node.manifest[f"{kind}Probe"] for kind in ("startup", "liveness"))


def test_the_prometheus_rule_is_what_the_rule_files_say() -> None:
    """`python -m tests.support.prometheusrule` was run after the last change of the rules."""
    assert RULES_FILE.read_text(encoding="utf-8") == rules_text()
    groups = [group for name in ("rules.yml", "alerts.yml") for group in load(DEPLOY / "prometheus" / name)["groups"]]
    assert yaml.safe_load(rules_text())["spec"]["groups"] == groups


def test_dashboards_are_in_maps_that_kubectl_can_apply() -> None:
    """Both of them, below what an annotation may hold: kubectl apply keeps a copy there."""
    maps = [
        each
        for each in of_kind(rendered("overlays/production"), "ConfigMap")
        if "dashboard" in each["metadata"]["name"]
    ]
    files = {name: text for each in maps for name, text in each["data"].items()}
    assert files == {
        path.name: path.read_text(encoding="utf-8") for path in (DEPLOY / "grafana/dashboards").glob("*.json")
    }
    for each in maps:
        assert len(yaml.safe_dump(each)) < 200_000
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_prometheus_finds_the_ports_that_pods_have() -> None:
    """Each PodMonitor selects pods with a port of that name, keeps what they say of themselves, and names its job."""
    objects = [*rendered("overlays/production"), *rendered("overlays/production-gpt")]
    settings = settings_of(objects)
    labelled = [(pod["metadata"]["labels"], container(pod, settings)) for _, pod in pods(objects)]
    jobs_named = set()
    for each in of_kind(objects, "PodMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"]
        selected = [started for labels, started in labelled if wanted.items() <= labels.items()]
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        assert len(selected) == 1
        assert endpoint["port"] in selected[0].ports
        (relabeling,) = endpoint["relabelings"]
        assert (relabeling["targetLabel"], relabeling["replacement"]) == ("job", each["metadata"]["name"])
        jobs_named.add(relabeling["replacement"])
        assert endpoint.get("honorLabels", False) is (selected[0].name != "etcd")
    scraped = {each["job_name"] for each in load(DEPLOY / "prometheus/prometheus.yml")["scrape_configs"]}
    assert jobs_named == scraped | {"elastic-trainer-etcd"}


HERE = {"kubernetes.io/metadata.name": "elastic-trainer"}
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
STRANGER = Pod(
    {"app.kubernetes.io/name": "etcd", "app.kubernetes.io/part-of": "elastic-trainer"}, {"other": "namespace"}
)
NEIGHBOR = Pod({"app.kubernetes.io/name": "web"}, HERE)
DNS = Pod({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
WORLD = Pod({}, {}, "8.8.8.8")


NEEDED = [
    ("gpt", "etcd", DEFAULT_ETCD_PORT), ("monitor", "etcd", DEFAULT_ETCD_PORT), ("etcd", "etcd", 2380),
    ("gpt", "gpt", 29500), ("gpt", "gpt", 41234), ("prometheus", "gpt", 9471), ("prometheus", "monitor", DEFAULT_PORT),
    ("prometheus", "etcd", 2381), ("gpt", "dns", 53), ("monitor", "dns", 53), ("etcd", "dns", 53),
]  # fmt: skip
REFUSED = [
    ("gpt", "etcd", 2380), ("monitor", "etcd", 2380), ("monitor", "gpt", 9471), ("gpt", "monitor", DEFAULT_PORT),
    ("gpt", "other", 29500), ("other", "gpt", 29500), ("prometheus", "gpt", 29500),
    ("prometheus", "etcd", DEFAULT_ETCD_PORT),
    ("neighbor", "etcd", DEFAULT_ETCD_PORT), ("neighbor", "gpt", 9471), ("neighbor", "monitor", DEFAULT_PORT),
    ("stranger", "etcd", 2380), ("gpt", "world", 443), ("monitor", "world", 443), ("etcd", "world", 443),
    ("etcd", "gpt", 9471), ("gpt", "dns", 443), ("neighbor", "world", 443), ("world", "neighbor", 80),
]  # fmt: skip


def test_what_is_needed_may_connect_and_everything_else_is_refused() -> None:
    """Nodes and the monitor reach etcd, nodes of a run each other, Prometheus all three, everybody names; not other
    runs, other pods of the namespace, other namespaces, the world, or ports that are not these."""
    objects = [*rendered("overlays/production"), *rendered("overlays/production-gpt")]
    policies = of_kind(objects, "NetworkPolicy")
    known = {
        name: Pod(named(objects, kind, name)["spec"]["template"]["metadata"]["labels"], HERE)
        for kind, name in (("StatefulSet", "etcd"), ("Deployment", "monitor"), ("Job", "gpt"))
    }
    known["other"] = Pod({**known["gpt"].labels, "elastic-trainer/run": "other"}, HERE)
    known |= {"prometheus": PROMETHEUS, "dns": DNS, "neighbor": NEIGHBOR, "stranger": STRANGER, "world": WORLD}
    for source, target, port in NEEDED:
        for protocol in ("TCP", "UDP") if target == "dns" else ("TCP",):
            assert may_connect(policies, HERE, known[source], known[target], port, protocol), (source, target, port)
    for source, target, port in REFUSED:
        assert not may_connect(policies, HERE, known[source], known[target], port), (source, target, port)


@pytest.mark.parametrize(("target", "patch"), PATCHES, ids=[patch for _, patch in PATCHES])
def test_a_patch_leaves_a_job_that_is_right(target: str, patch: str) -> None:
    """Sizes stay within the limits of the dev job, and what is patched are fields that exist."""
    assert target == "job mnist"
    objects = rendered("overlays/dev")
    job = named(objects, "Job", "mnist")
    before, changes = copy.deepcopy(job), json.loads(patch)
    job["spec"] |= changes.pop("spec")
    assert changes == {}
    assert job != before
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


LIMIT_S = 60.0


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Secrets that `deploy/etcd/certificates.sh` makes, as directories by where they are mounted."""
    needs("openssl", "it makes the certificates")
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run(["bash", str(DEPLOY / "etcd/certificates.sh"), str(made)], check=True, timeout=100)
    paths = {"server": "/etc/etcd-server-tls", "peer": "/etc/etcd-peer-tls", "client": "/etc/elastic-trainer-tls"}
    mounted = {}
    for name, path in paths.items():
        mounted[path] = made / f"etcd-{name}-tls"
        mounted[path].mkdir()
        for file, source in (("ca.crt", "ca.crt"), ("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key")):
            shutil.copy(made / source, mounted[path] / file)
    return mounted


@pytest.fixture(scope="module")
def etcd(volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderedEtcd]:
    with RenderedEtcd(rendered("overlays/production"), tmp_path_factory.mktemp("etcd"), volumes) as running:
        yield running


@pytest.fixture(scope="module")
def passwords(etcd: RenderedEtcd, volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What k8s/README.md does once and for each run: users for the monitor and the run, as directories of Secrets."""
    directory = tmp_path_factory.mktemp("users")
    (directory / "root-password").write_text("the password of root\n")
    options = ["--user", "root", "--password-file", str(directory / "root-password"), "--format", "kubernetes"]
    known = settings_of(rendered("overlays/production"))["elastic-trainer"]
    here = {name: etcd.local(value) for name, value in known.items() if "PASSWORD" not in name}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in here.items():
            patch.setenv(name, value)
        for words in (["init"], ["grant", "gpt"]):
            file = directory / f"{words[-1]}.json"
            assert main(["admin", *words, *options, "--output", str(file)]) == 0
            made = json.loads(file.read_text())
            secret = directory / made["metadata"]["name"]
            secret.mkdir()
            for key, value in made["stringData"].items():
                (secret / key).write_text(value)
    return directory


def environment(etcd: RenderedEtcd, started: Container, secret: Path) -> dict[str, str]:
    """The variables of a container, with the Secret of its user at ``secret``."""
    here = {name: etcd.local(value) for name, value in variables(started).items()}
    here = {name: value.replace("/etc/elastic-trainer-etcd", str(secret)) for name, value in here.items()}
    assert here["ELASTIC_TRAINER_USER"] == f"username of {secret.name}"
    return here | {"ELASTIC_TRAINER_USER": (secret / "username").read_text()}


def test_three_members_come_up_and_their_probes_tell(etcd: RenderedEtcd) -> None:
    """etcd takes each flag and variable; probes need no certificate; clients without one are refused."""
    asked = [(name, probe) for name in etcd.names for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    # On a slow machine they may elect a leader anew in between.
    eventually(lambda: all(etcd.answers(*each) == 200 for each in asked), "not all probes of all members are answered")
    assert len(etcd.names) == 3
    client = f"{HOST}:{etcd.ports['etcd-0']['client']}"
    assert status(f"https://{client}/health") is None
    endpoint = StoreSettings.model_validate({"endpoints": [{"host": HOST, "port": etcd.ports["etcd-0"]["client"]}]})
    with pytest.raises(ElasticTrainerError):
        connect_checked(endpoint, Deadline.after(5.0)).close()


def peers_port(etcd: RenderedEtcd, secret: Path) -> int | None:
    """The status that a member's port for members has for the holder of a certificate; None: it hangs up."""
    context = ssl.create_default_context(cafile=secret / "ca.crt")
    context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
    try:
        with urllib.request.urlopen(
            f"https://{HOST}:{etcd.ports['etcd-0']['peer']}/members", timeout=30, context=context
        ) as answer:
            return int(answer.status)
    except OSError:
        return None


def test_a_client_is_no_member(etcd: RenderedEtcd, volumes: dict[str, Path]) -> None:
    """All certificates have one authority; only the members' own opens the port by which they agree."""
    assert peers_port(etcd, volumes["/etc/etcd-peer-tls"]) == 200
    assert peers_port(etcd, volumes["/etc/elastic-trainer-tls"]) is None


@contextmanager
def running(command: list[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_the_monitor_gets_ready_with_its_own_user(etcd: RenderedEtcd, passwords: Path, tmp_path: Path) -> None:
    """Its rendered command and variables are enough to read etcd, and its readiness says so."""
    objects = rendered("overlays/production")
    monitor = container(named(objects, "Deployment", "monitor")["spec"]["template"], settings_of(objects))
    (port,) = free_ports(1)
    path, number = monitor.probe("readinessProbe")
    command = [part.replace(f"0.0.0.0:{number}", f"{HOST}:{port}") for part in monitor.command]
    assert command[0] == "elastic-trainer"
    environ = quiet(os.environ) | environment(etcd, monitor, passwords / "etcd-user-monitor")
    log = tmp_path / "monitor.log"
    with running([sys.executable, "-m", "elastic_trainer.cli.main", *command[1:]], environ, log) as process:
        deadline = Deadline.after(LIMIT_S)
        while status(f"http://{HOST}:{port}{path}") != 200:
            assert process.poll() is None, log.read_text()
            assert not deadline.expired, log.read_text()
            pause(0.2)


def test_a_node_of_the_run_is_let_in_and_sees_no_other_run(
    etcd: RenderedEtcd, passwords: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arguments and variables of the rendered Job, and the Secret that `admin grant` printed."""
    objects = rendered("overlays/production-gpt")
    settings = settings_of(objects)
    settings["elastic-trainer"] = settings_of(rendered("overlays/production"))["elastic-trainer"]
    (job,) = jobs(objects)
    it = Training(job, settings)
    for name, value in environment(etcd, it.trainer, passwords / "etcd-user-gpt").items():
        monkeypatch.setenv(name, value)
    options = rendezvous_options(_parse_rendezvous_config(it.torchrun.rdzv_conf))
    run, endpoint = it.torchrun.rdzv_id, etcd.local(it.torchrun.rdzv_endpoint)
    store = connect_checked(options.store(endpoint), Deadline.after(LIMIT_S), run=run)
    try:
        assert put(store, f"{options.prefix}/{run}/spec", b"{}")
        with pytest.raises(AccessDeniedError):
            put(store, f"{options.prefix}/other/spec", b"{}")
    finally:
        store.close()
