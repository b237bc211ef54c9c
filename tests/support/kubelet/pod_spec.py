"""What a pod is to be, field by field; any other field is an error.

*Fails by* pydantic's ValidationError, ConfigError for a quantity. Fields of type ``Any`` are known and have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from elastic_trainer.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int) -> int:
    """The number of bytes that ``64Mi`` and the like mean."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a quantity of bytes")
    return int(found[1]) * _UNITS[found[2]]


class Part(BaseModel):
    """Base of all parts of an object."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Metadata(Part):
    """Who an object is."""

    name: str = ""
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class FieldRef(Part):
    """A field of the pod itself."""

    field_path: str
    api_version: str = "v1"


class KeyRef(Part):
    """One key of a ConfigMap or Secret."""

    name: str
    key: str
    optional: bool = False


class ValueFrom(Part):
    """Where a variable's value comes from."""

    field_ref: FieldRef | None = None
    config_map_key_ref: KeyRef | None = None
    secret_key_ref: KeyRef | None = None


class Variable(Part):
    """One environment variable."""

    name: str
    value: str = ""
    value_from: ValueFrom | None = None


class SourceRef(Part):
    """A whole ConfigMap or Secret."""

    name: str
    optional: bool = False


class VariablesFrom(Part):
    """Variables from all keys of a ConfigMap or Secret."""

    prefix: str = ""
    config_map_ref: SourceRef | None = None
    secret_ref: SourceRef | None = None


class Port(Part):
    """A port of a container."""

    container_port: int
    name: str = ""
    protocol: Literal["TCP"] = "TCP"


class HttpGet(Part):
    """A probe by HTTP."""

    port: int | str
    path: str = "/"
    scheme: Literal["HTTP"] = "HTTP"


class ExecAction(Part):
    """A probe by a command in the container."""

    command: list[str]


class TcpSocket(Part):
    """A probe by a connection."""

    port: int | str


class Probe(Part):
    """How the kubelet asks a container how it is."""

    http_get: HttpGet | None = None
    exec: ExecAction | None = None
    tcp_socket: TcpSocket | None = None
    initial_delay_seconds: float = 0
    period_seconds: float = 10
    timeout_seconds: float = 1
    failure_threshold: int = 3
    success_threshold: int = 1

    @model_validator(mode="after")
    def _one_way(self) -> Probe:
        if sum(way is not None for way in (self.http_get, self.exec, self.tcp_socket)) != 1:
            raise ValueError("a probe has one of httpGet, exec, tcpSocket")
        return self


class Capabilities(Part):
    """Rights of a container beyond its user's."""

    drop: list[str] = []


class SecurityContext(Part):
    """What a container may do."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    read_only_root_filesystem: bool = False
    allow_privilege_escalation: bool = True
    capabilities: Capabilities = Capabilities()
    privileged: Literal[False] = False
    seccomp_profile: Any = None


class PodSecurityContext(Part):
    """The same for all containers of a pod."""

    run_as_user: int | None = None
    run_as_group: int | None = None
    run_as_non_root: bool | None = None
    fs_group: int | None = None
    fs_group_change_policy: Any = None
    supplemental_groups: list[int] = []
    seccomp_profile: Any = None


class Mount(Part):
    """Where a container sees a volume."""

    name: str
    mount_path: str
    read_only: bool = False


class Container(Part):
    """One container."""

    name: str
    image: str
    command: list[str] = []
    args: list[str] = []
    working_dir: str = ""
    env: list[Variable] = []
    env_from: list[VariablesFrom] = []
    ports: list[Port] = []
    volume_mounts: list[Mount] = []
    security_context: SecurityContext = SecurityContext()
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    image_pull_policy: Any = None
    resources: Any = None
    termination_message_policy: Any = None

    def port(self, port: int | str) -> int:
        """The number of a port that may be given by name."""
        if isinstance(port, int):
            return port
        for known in self.ports:
            if known.name == port:
                return known.container_port
        raise ConfigError(f"container {self.name} has no port {port!r}")


class EmptyDir(Part):
    """A directory that lives as long as its pod."""

    medium: Literal["", "Memory"] = ""
    size_limit: str | None = None


class Item(Part):
    """A key of a ConfigMap or Secret, and the file that it becomes."""

    key: str
    path: str
    mode: int | None = None


class ConfigMapVolume(Part):
    """The keys of a ConfigMap as files."""

    name: str
    items: list[Item] | None = None
    default_mode: int = 0o644
    optional: bool = False


class SecretVolume(Part):
    """The keys of a Secret as files."""

    secret_name: str
    items: list[Item] | None = None
    default_mode: int = 0o644
    optional: bool = False


class ClaimVolume(Part):
    """A volume that outlives pods."""

    claim_name: str
    read_only: bool = False


class Volume(Part):
    """One volume of a pod."""

    name: str
    empty_dir: EmptyDir | None = None
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        sources = (self.empty_dir, self.config_map, self.secret, self.persistent_volume_claim)
        if sum(source is not None for source in sources) != 1:
            raise ValueError("a volume has one of emptyDir, configMap, secret, persistentVolumeClaim")
        return self


class PodSpec(Part):
    """What a pod is to be. One container each: more are an error."""

    containers: list[Container] = Field(min_length=1, max_length=1)
    volumes: list[Volume] = []
    security_context: PodSecurityContext = PodSecurityContext()
    restart_policy: Literal["Always", "Never"] = "Always"
    termination_grace_period_seconds: float = 30
    hostname: str = ""
    subdomain: str = ""
    enable_service_links: bool = True
    share_process_namespace: bool = False
    service_account_name: str = "default"
    automount_service_account_token: Literal[False]
    affinity: Any = None
    node_selector: Any = None
    priority_class_name: Any = None
    tolerations: Any = None
    topology_spread_constraints: Any = None

    @property
    def container(self) -> Container:
        """The one container."""
        return self.containers[0]


class PodTemplate(Part):
    """Pods of a controller."""

    metadata: Metadata = Metadata()
    spec: PodSpec


class Selector(Part):
    """Which pods are meant."""

    match_labels: dict[str, str]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a pod with ``labels`` is one of them."""
        return self.match_labels.items() <= labels.items()
