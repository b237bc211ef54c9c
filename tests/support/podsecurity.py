"""The Pod Security Standard *restricted*, as Kubernetes' documentation lists its rules, and what this project adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    "net.ipv4.tcp_keepalive_probes",
}
SECCOMP = {"RuntimeDefault", "Localhost"}


def violations(spec: dict[str, Any]) -> list[str]:
    """What the admission of the API server would refuse in a pod, and what this project forbids beyond it."""
    return [*_of_pod(spec), *_of_volumes(spec), *_of_containers(spec), *_of_this_project(spec)]


def _of_pod(spec: dict[str, Any]) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is set"
    context = spec.get("securityContext", {})
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess is set"


def _of_volumes(spec: dict[str, Any]) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        for kind in set(volume) - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is a {kind}"


def _of_containers(spec: dict[str, Any]) -> Iterator[str]:
    whole = spec.get("securityContext", {})
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            for problem in _of_container(container, whole):
                yield f"{container['name']}: {problem}"


def _of_container(container: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if own.get("seccompProfile", whole.get("seccompProfile", {})).get("type") not in SECCOMP:
        yield "no seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"


def _of_this_project(spec: dict[str, Any]) -> Iterator[str]:
    """No token for the API server, a root file system that cannot be written, and a user that is said as a number."""
    if spec.get("automountServiceAccountToken") is not False:
        yield "a service account's token is mounted"
    if spec.get("enableServiceLinks") is not False:
        yield "names of services become variables, which etcd takes for its own"
    if not spec.get("securityContext", {}).get("runAsUser"):
        yield "runAsUser is not said"
    for container in spec["containers"]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: its root file system can be written"
