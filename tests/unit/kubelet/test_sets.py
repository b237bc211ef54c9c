"""Which pods controllers want, who those are, and by which names they are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from tests.support.kubelet import sets
from tests.support.kubelet.job_rules import Phase
from tests.support.kubelet.names import Known, hosts, records
from tests.support.kubelet.objects import Deployment, Service, StatefulSet, parsed
from tests.support.kubelet.pod_spec import Container
from tests.support.kubelet.pods import PodStatus, backoff_s
from tests.unit.kubelet.test_objects import JOB

POD = {
    "metadata": {"labels": {"app": "etcd"}},
    "spec": {"automountServiceAccountToken": False, "containers": [{"name": "c", "image": "i", "command": ["true"]}]},
}


def stateful(replicas: int = 3, policy: str = "OrderedReady") -> StatefulSet:
    return StatefulSet.model_validate(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "etcd", "namespace": "ns"},
            "spec": {
                "replicas": replicas,
                "serviceName": "etcd",
                "podManagementPolicy": policy,
                "selector": {"matchLabels": {"app": "etcd"}},
                "template": POD,
                "volumeClaimTemplates": [{"metadata": {"name": "data"}}],
            },
        }
    )


def status(number: int, ready: bool = True, deleting: bool = False) -> PodStatus:
    return PodStatus(f"etcd-{number}", "StatefulSet/etcd", number, Phase.RUNNING, ready, "10.0.0.1", deleting=deleting)


def test_ordered_pods_come_one_after_the_other() -> None:
    """Each when all before it are ready; Parallel ones all at once."""
    assert sets.wanted(stateful(), []) == ([0], [])
    assert sets.wanted(stateful(), [status(0, ready=False)]) == ([], [])
    assert sets.wanted(stateful(), [status(0)]) == ([1], [])
    assert sets.wanted(stateful(policy="Parallel"), [status(1, ready=False)]) == ([0, 2], [])


def test_pods_too_many_are_told_to_go_once() -> None:
    """The highest numbers."""
    assert sets.wanted(stateful(1), [status(0), status(1), status(2, deleting=True)]) == ([], ["etcd-1"])


def test_pods_of_stateful_sets_keep_name_and_claim() -> None:
    """What they are told about themselves is the same after a replacement."""
    who = sets.identity(stateful(), 2, "abcde")
    assert (who.name, who.hostname, who.namespace) == ("etcd-2", "etcd-2", "ns")
    assert who.claims == {"data": "data-etcd-2"}


def test_pods_of_indexed_jobs_know_their_index() -> None:
    """By name, hostname, label, annotation and environment."""
    job: Any = parsed(JOB)
    who = sets.identity(job, 3, "abcde")
    assert (who.name, who.hostname, who.index) == ("j-3-abcde", "j-3", 3)
    assert who.environment == {"JOB_COMPLETION_INDEX": "3"}
    assert who.labels[sets.JOB_INDEX] == who.annotations[sets.JOB_INDEX] == "3"


def test_pods_of_deployments_have_names_of_their_own() -> None:
    """Each a new one."""
    spec = {"selector": {"matchLabels": {"app": "etcd"}}, "template": POD}
    thing = Deployment.model_validate(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "monitor"}, "spec": spec}
    )
    assert sets.identity(thing, 0, "abcde").name == "monitor-abcde"


def test_restarts_wait_longer_each_time() -> None:
    """The first follows at once, none waits longer than five minutes."""
    assert [backoff_s(number) for number in (0, 1, 2, 9)] == [0.0, 10.0, 20.0, 300.0]


# ---- names


@dataclass(frozen=True, slots=True)
class Someone:
    """A pod as names see it."""

    hostname: str
    address: str
    ready: bool = True
    subdomain: str = "etcd"
    container: Container = Container.model_validate(  # noqa: RUF009 - frozen
        {"name": "c", "image": "i", "ports": [{"name": "client", "containerPort": 2379}]}
    )


def service(name: str = "etcd", ip: str | None = "None", early: bool = False, port: int = 2379) -> Service:
    ports = [{"port": port, "targetPort": "client"}]
    spec = {"selector": {"a": "b"}, "clusterIP": ip, "ports": ports, "publishNotReadyAddresses": early}
    meta = {"name": name, "namespace": "ns"}
    return Service.model_validate({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})


def test_services_and_their_pods_have_names_with_and_without_suffixes() -> None:
    """Pods of a headless Service one each, under the subdomain that they name."""
    ((address, names),) = records([Known(service(), [Someone("etcd-0", "10.0.0.2")])])
    assert address == "10.0.0.2"
    assert {"etcd", "etcd.ns.svc", "etcd-0.etcd", "etcd-0.etcd.ns.svc.cluster.local"} <= set(names)
    ((_, others),) = records([Known(service("monitor", None), [Someone("m", "10.0.0.3", subdomain="")])])
    assert others == ["monitor", "monitor.ns", "monitor.ns.svc", "monitor.ns.svc.cluster.local"]


def test_pods_that_are_not_ready_have_no_name_unless_the_service_says_so() -> None:
    """publishNotReadyAddresses."""
    pods = [Someone("etcd-0", "10.0.0.2", ready=False)]
    assert records([Known(service(), pods)]) == []
    assert len(records([Known(service(early=True), pods)])) == 1


def test_a_service_that_translates_ports_is_an_error() -> None:
    """Its name leads straight to the pods here."""
    with pytest.raises(ConfigError, match="leads to another port"):
        records([Known(service(port=80), [Someone("etcd-0", "10.0.0.2")])])


def test_a_hosts_file_begins_with_the_pod_itself() -> None:
    """A resolver takes the first line that fits."""
    text = hosts("10.0.0.2", ["etcd-0"], [("10.0.0.2", ["etcd"])])
    assert text == "127.0.0.1 localhost\n10.0.0.2 etcd-0\n10.0.0.2 etcd\n"
