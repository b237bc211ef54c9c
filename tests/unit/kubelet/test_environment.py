"""Variables and words of a container, as the kubelet makes them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.environment import Facts, expanded, service_links, variables, words
from tests.support.kubelet.objects import ConfigMap, Secret, Service
from tests.support.kubelet.pod_spec import Container

CONFIG = ConfigMap.model_validate(
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"HOST": "etcd", "PORT": "2379"}}
)
SECRET = Secret.model_validate(
    {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"password": base64.b64encode(b"hidden").decode()},
        "stringData": {"user": "me"},
    }
)
FACTS = Facts("pod-0", "ns", "10.0.0.7", {"a/b": "l"}, {"a/b": "n"}, {"c": CONFIG}, {"s": SECRET}, {"LINK": "x"})


def container(**more: Any) -> Container:
    return Container.model_validate({"name": "c", "image": "i", **more})


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)-$(B)", "1-2"),
        ("$(UNKNOWN) $A ${A}", "$(UNKNOWN) $A ${A}"),
        ("$$(A) $$", "$(A) $"),
        ("$(A", "$(A"),
    ],
)
def test_references_are_expanded_as_kubernetes_does_it(text: str, result: str) -> None:
    """Unknown names stay, ``$$`` escapes, and nothing looks like a shell's."""
    assert expanded(text, {"A": "1", "B": "2"}) == result


def test_variables_come_in_order_and_later_ones_win() -> None:
    """Links, then envFrom, then env; a value refers to what was there before it, and to nothing behind it."""
    made = variables(
        container(
            envFrom=[{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}],
            env=[
                {"name": "URL", "value": "$(HOST):$(PORT)/$(LATER)"},
                {"name": "LATER", "value": "no"},
                {"name": "PORT", "value": "1"},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "password"}}},
                {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "x", "optional": True}}},
            ],
        ),
        FACTS,
    )
    assert made["URL"] == "etcd:2379/$(LATER)"
    assert (made["PORT"], made["S_user"], made["S_password"], made["KEY"]) == ("1", "me", "hidden", "hidden")
    assert made["LINK"] == "x"
    assert "NONE" not in made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "pod-0"),
        ("metadata.namespace", "ns"),
        ("status.podIP", "10.0.0.7"),
        ("metadata.annotations['a/b']", "n"),
        ("metadata.labels['a/b']", "l"),
        ("metadata.labels['none']", ""),
    ],
)
def test_fields_of_the_pod(path: str, value: str) -> None:
    """The downward API."""
    source = [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": path}}}]
    assert variables(container(env=source), FACTS)["X"] == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"env": [{"name": "X", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]},
        {"env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "none"}}}]},
        {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]},
        {"envFrom": [{"configMapRef": {"name": "none"}}]},
        {"envFrom": [{"secretRef": {"name": "none"}}]},
    ],
)
def test_what_is_not_there_is_an_error(wrong: dict[str, Any]) -> None:
    """A cluster would leave the pod waiting."""
    with pytest.raises(ConfigError):
        variables(container(**wrong), FACTS)


def test_the_command_is_expanded_with_its_arguments() -> None:
    """An image's own command is not known here."""
    assert words(container(command=["run"], args=["--at=$(A)"]), {"A": "1"}) == ["run", "--at=1"]
    with pytest.raises(ConfigError, match="give the command too"):
        words(container(args=["x"]), {})


def test_links_to_services_leave_out_headless_ones() -> None:
    """They have no address of their own: so one named etcd sets no ETCD_PORT, which etcd would take for a flag."""

    def service(name: str, ip: str | None) -> Service:
        spec = {"selector": {"a": "b"}, "ports": [{"port": 9470}], "clusterIP": ip}
        return Service.model_validate({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})

    links = service_links([(service("my-monitor", None), "10.0.0.9"), (service("etcd", "None"), "10.0.0.8")])
    assert links == {
        "MY_MONITOR_SERVICE_HOST": "10.0.0.9",
        "MY_MONITOR_SERVICE_PORT": "9470",
        "MY_MONITOR_PORT": "tcp://10.0.0.9:9470",
    }
