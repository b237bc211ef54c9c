"""The NetworkPolicies of production let through what is needed, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.monitor.serve import DEFAULT_PORT
from elastic_trainer.settings import DEFAULT_ETCD_PORT
from tests.support.connections import Pod, may_connect
from tests.support.manifests import Manifest, named, of_kind, rendered

HERE = {"kubernetes.io/metadata.name": "elastic-trainer"}
PROMETHEUS = Pod({"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
STRANGER = Pod(
    {"app.kubernetes.io/name": "etcd", "app.kubernetes.io/part-of": "elastic-trainer"}, {"other": "namespace"}
)
NEIGHBOR = Pod({"app.kubernetes.io/name": "web"}, HERE)
DNS = Pod({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
WORLD = Pod({}, {}, "8.8.8.8")


def policies_and_pods() -> tuple[list[Manifest], dict[str, Pod]]:
    """The policies of production with its run, and its pods by name; another run's as well."""
    objects = [*rendered("overlays/production"), *rendered("overlays/production-gpt")]
    labelled = {
        name: Pod(named(objects, kind, name)["spec"]["template"]["metadata"]["labels"], HERE)
        for kind, name in (("StatefulSet", "etcd"), ("Deployment", "monitor"), ("Job", "gpt"))
    }
    labelled["other"] = Pod({**labelled["gpt"].labels, "elastic-trainer/run": "other"}, HERE)
    return of_kind(objects, "NetworkPolicy"), labelled


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


@pytest.mark.parametrize(("source", "target", "port"), NEEDED)
def test_what_is_needed_may_connect(source: str, target: str, port: int) -> None:
    """Nodes and the monitor reach etcd, nodes of a run each other, Prometheus all three, everybody names."""
    policies, own = policies_and_pods()
    known = own | {"prometheus": PROMETHEUS, "dns": DNS}
    protocols = ("TCP", "UDP") if target == "dns" else ("TCP",)
    assert all(may_connect(policies, HERE, known[source], known[target], port, each) for each in protocols)


@pytest.mark.parametrize(("source", "target", "port"), REFUSED)
def test_everything_else_is_refused(source: str, target: str, port: int) -> None:
    """Other runs, other pods of the namespace, other namespaces, the world, and ports that are not these."""
    policies, own = policies_and_pods()
    known = own | {"prometheus": PROMETHEUS, "dns": DNS, "neighbor": NEIGHBOR, "stranger": STRANGER, "world": WORLD}
    assert not may_connect(policies, HERE, known[source], known[target], port)


def test_policies_name_ports_that_somebody_listens_on() -> None:
    """Each port in a policy is one of a container, or that of names."""
    policies, _ = policies_and_pods()
    objects = [*rendered("overlays/production"), *rendered("overlays/production-gpt")]
    listened = {
        port["containerPort"]
        for each in objects
        if each["kind"] in ("StatefulSet", "Deployment", "Job")
        for one in each["spec"]["template"]["spec"]["containers"]
        for port in one["ports"]
    }
    rules: list[dict[str, Any]] = [
        rule for each in policies for way in ("ingress", "egress") for rule in each["spec"].get(way, ())
    ]
    assert {port["port"] for rule in rules for port in rule.get("ports", ())} == listened | {53}
