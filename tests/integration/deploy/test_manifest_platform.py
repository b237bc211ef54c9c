"""etcd and the monitor in the manifests: names, ports and probes agree, and members are kept apart."""

from __future__ import annotations

import pytest
from prometheus_client.registry import CollectorRegistry

from elastic_trainer.monitor.serve.answers import MonitorSite
from elastic_trainer.monitor.serve.board import Board
from elastic_trainer.monitor.serve.service import DEFAULT_PORT
from elastic_trainer.settings import DEFAULT_ETCD_PORT, parse_endpoints
from elastic_trainer.web.access import Access
from elastic_trainer.web.answers import Answer, Request, Site
from elastic_trainer.web.node import NodeSite
from tests.support.agreement import quantity
from tests.support.deployment import DEPLOY, load
from tests.support.manifests import Container, container, named, of_kind, rendered, settings_of


@pytest.mark.parametrize("name", ["dev", "production"])
def test_the_members_of_etcd_know_each_other_and_clients_know_them(name: str) -> None:
    """Names, ports and number of members in the StatefulSet, its Service, its variables and the clients' variable."""
    objects = rendered(f"overlays/{name}")
    workload, service = named(objects, "StatefulSet", "etcd"), named(objects, "Service", "etcd")
    settings = settings_of(objects)
    members = [f"etcd-{number}" for number in range(workload["spec"]["replicas"])]
    etcd = container(workload["spec"]["template"], settings, pod="etcd-0")
    scheme = etcd.environment["SCHEME"]
    assert option(etcd, "initial-cluster") == ",".join(f"{each}={scheme}://{each}.etcd:2380" for each in members)
    assert option(etcd, "name") == "etcd-0"
    assert option(etcd, "initial-advertise-peer-urls") == f"{scheme}://etcd-0.etcd:2380"
    assert option(etcd, "advertise-client-urls") == f"{scheme}://etcd-0.etcd:{DEFAULT_ETCD_PORT}"
    listening = {name: f"{scheme}://0.0.0.0:{port}" for name, port in etcd.ports.items()} | {
        "metrics": "http://0.0.0.0:2381"
    }
    assert listening == {
        "client": option(etcd, "listen-client-urls"),
        "peer": option(etcd, "listen-peer-urls"),
        "metrics": option(etcd, "listen-metrics-urls"),
    }
    assert etcd.ports["client"] == DEFAULT_ETCD_PORT
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == {
        "client": DEFAULT_ETCD_PORT,
        "peer": 2380,
    }
    assert workload["spec"]["serviceName"] == service["metadata"]["name"] == "etcd"
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    endpoints = parse_endpoints(settings["elastic-trainer"]["ELASTIC_TRAINER_ENDPOINT"])
    assert {each.port for each in endpoints} == {DEFAULT_ETCD_PORT}
    assert {each.host for each in endpoints} == ({f"{each}.etcd" for each in members} if len(members) > 1 else {"etcd"})


def option(etcd: Container, name: str) -> str:
    """The value of one of etcd's flags."""
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


@pytest.mark.parametrize("name", ["dev", "production"])
def test_the_monitor_listens_where_all_look_for_it(name: str) -> None:
    """Its own default port in the command, the container, the Service and compose.yaml, open to the cluster."""
    objects = rendered(f"overlays/{name}")
    workload, service = named(objects, "Deployment", "monitor"), named(objects, "Service", "monitor")
    monitor = container(workload["spec"]["template"], settings_of(objects))
    assert monitor.command == ["elastic-trainer", "monitor", f"--listen=0.0.0.0:{DEFAULT_PORT}"]
    assert monitor.command[2] in load(DEPLOY / "compose.yaml")["services"]["monitor"]["command"]
    assert monitor.ports == {"http": DEFAULT_PORT}
    assert service["spec"]["ports"] == [{"name": "http", "port": DEFAULT_PORT, "targetPort": "http"}]
    assert service["spec"]["publishNotReadyAddresses"] is True  # its page is wanted most while etcd is away
    for probe, path in {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}.items():
        assert monitor.probe(probe) == (path, DEFAULT_PORT)
    budgets = [each for each in of_kind(objects, "PodDisruptionBudget") if each["metadata"]["name"] == "monitor"]
    assert all(each["spec"]["minAvailable"] < workload["spec"]["replicas"] for each in budgets)
    assert bool(budgets) is (name == "production")


def test_liveness_never_depends_on_others_and_readiness_does() -> None:
    """The probes' paths, asked of the real sites: of a node without a round, and of a monitor that has read nothing."""
    node = NodeSite(CollectorRegistry(), Access(), lambda: "this node is in no round")
    monitor = MonitorSite(Board(), Access())
    dev = rendered("overlays/dev")
    asked: dict[Site, Container] = {
        node: container(named(dev, "Job", "mnist")["spec"]["template"], settings_of(dev)),
        monitor: container(named(dev, "Deployment", "monitor")["spec"]["template"], settings_of(dev)),
    }
    for site, started in asked.items():
        for probe, status in {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}.items():
            if "exec" in started.manifest[probe]:  # a node's: the time of a file
                continue
            answer = site.answer(Request("GET", started.probe(probe)[0], {"host": "10.1.2.3:9471"}))
            assert isinstance(answer, Answer)
            assert answer.status == status
