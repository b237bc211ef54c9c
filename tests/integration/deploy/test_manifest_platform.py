"""etcd and the monitor in the manifests: names, ports and probes agree, and members are kept apart."""

from __future__ import annotations

import pytest
from prometheus_client.registry import CollectorRegistry

from elastic_trainer.monitor.serve import Board, MonitorSite
from elastic_trainer.web.node import NodeSite
from elastic_trainer.web.server import Access, Answer, Request, Site
from tests.support.agreement import quantity
from tests.support.deployment import DEPLOY, load
from tests.support.manifests import Container, container, named, rendered, settings_of


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
