"""The names that a cluster's DNS would know, as lines of a hosts file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.objects import Service
from tests.support.kubelet.pod_spec import Container


class Named(Protocol):
    """What a name needs to know about a pod."""

    @property
    def hostname(self) -> str: ...
    @property
    def subdomain(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def container(self) -> Container: ...


@dataclass(frozen=True, slots=True)
class Known:
    """A Service and the running pods that it selects."""

    service: Service
    pods: Sequence[Named]

    @property
    def answering(self) -> list[Named]:
        """The pods that its name leads to."""
        return [pod for pod in self.pods if pod.ready or self.service.spec.publish_not_ready_addresses]


def long_and_short(name: str, namespace: str) -> list[str]:
    """``name`` with and without the namespace's suffixes."""
    return [name, f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local"]


def records(known: Iterable[Known]) -> list[tuple[str, list[str]]]:
    """Addresses and their names."""
    found = []
    for each in known:
        name, namespace = each.service.metadata.name, each.service.metadata.namespace
        for pod in each.answering:
            names = long_and_short(name, namespace)
            if each.service.headless and pod.subdomain == name:
                names += long_and_short(f"{pod.hostname}.{name}", namespace)
            check_ports(each.service, pod.container)
            found.append((pod.address, names))
    return found


def check_ports(service: Service, container: Container) -> None:
    """ConfigError where a Service translates a port: here its name leads straight to the pods."""
    for port in service.spec.ports:
        target = container.port(port.target_port) if port.target_port is not None else port.port
        if target != port.port:
            raise ConfigError(f"Service {service.metadata.name}: port {port.port} leads to another port, {target}")


def hosts(own_address: str, own_names: Sequence[str], others: Iterable[tuple[str, Sequence[str]]]) -> str:
    """The hosts file of one pod."""
    lines = ["127.0.0.1 localhost", f"{own_address} {' '.join(own_names)}"]
    return "".join(f"{line}\n" for line in [*lines, *(f"{address} {' '.join(names)}" for address, names in others)])
