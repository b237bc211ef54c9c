"""The Kubernetes objects that the stand-in knows, field by field; any other field or kind is an error.

*Fails by* ConfigError that names object and field. Fields of type ``Any`` are known and have no effect here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import explain

WITHOUT_EFFECT = frozenset({"Namespace", "ServiceAccount", "PodDisruptionBudget"})
"""Kinds that change nothing for the processes of one node."""
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def quantity(text: str) -> int:
    """The number of bytes that ``64Mi`` and the like mean."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", text)
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


# ---- pods


class Port(Part):
    """A port of a container."""

    container_port: int
    name: str


class HttpGet(Part):
    """A question by HTTP."""

    port: str
    path: str


class Exec(Part):
    """A command in the container, whose exit code is the answer."""

    command: list[str]


class Probe(Part):
    """How the kubelet asks a container how it is. One good answer is enough."""

    http_get: HttpGet | None = None
    exec: Exec | None = None
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int


class Capabilities(Part):
    """Rights of a container beyond its user's: none."""

    drop: tuple[Literal["ALL"]]


class SecurityContext(Part):
    """What a container may do. Only the strictest is played."""

    read_only_root_filesystem: Literal[True]
    allow_privilege_escalation: Literal[False]
    capabilities: Capabilities


class PodSecurityContext(Part):
    """Who the containers of a pod are."""

    run_as_user: int = Field(gt=0)
    run_as_group: int
    run_as_non_root: Literal[True]
    fs_group: int
    fs_group_change_policy: Any = None
    seccomp_profile: Any = None


class Mount(Part):
    """Where a container sees a volume."""

    name: str
    mount_path: str
    read_only: bool = False


class Container(Part):
    """One container. Command and variables are checked by ``manifests.container``."""

    name: str
    image: str
    command: list[str]
    env: Any = None
    env_from: Any = None
    ports: list[Port]
    volume_mounts: list[Mount]
    security_context: SecurityContext
    startup_probe: Probe
    readiness_probe: Probe
    liveness_probe: Probe
    image_pull_policy: Any = None
    resources: Any = None

    def port(self, name: str) -> int:
        """The number of a port."""
        for known in self.ports:
            if known.name == name:
                return known.container_port
        raise ConfigError(f"container {self.name} has no port {name!r}")


class EmptyDir(Part):
    """A directory that lives as long as its pod."""

    medium: Literal["", "Memory"] = ""
    size_limit: str


class ConfigMapVolume(Part):
    """The keys of a ConfigMap as files."""

    name: str


class ClaimVolume(Part):
    """A volume that outlives pods."""

    claim_name: str


class Volume(Part):
    """One volume of a pod."""

    name: str
    empty_dir: EmptyDir | None = None
    config_map: ConfigMapVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None


class PodSpec(Part):
    """What a pod is to be. One container each: more are an error."""

    containers: tuple[Container]
    volumes: list[Volume] = []
    security_context: PodSecurityContext
    restart_policy: Literal["Always", "Never"] = "Always"
    termination_grace_period_seconds: float
    enable_service_links: Literal[False]
    automount_service_account_token: Literal[False]
    service_account_name: Any = None
    topology_spread_constraints: Any = None

    @property
    def container(self) -> Container:
        """The one container."""
        return self.containers[0]


class PodTemplate(Part):
    """Pods of a controller."""

    metadata: Metadata = Metadata()
    spec: PodSpec


# ---- jobs


class OnExitCodes(Part):
    """A rule's condition on the exit code."""

    operator: Literal["In"]
    values: list[int]
    container_name: Literal["trainer"]


class PodCondition(Part):
    """A pod's condition of this type and status."""

    type: str
    status: Literal["True"]


class FailureRule(Part):
    """What a pod's failure means."""

    action: Literal["FailJob", "Ignore"]
    on_exit_codes: OnExitCodes | None = None
    on_pod_conditions: list[PodCondition] | None = None

    def matches(self, exit_code: int, conditions: frozenset[str]) -> bool:
        """Whether it is about a pod that ended like this."""
        if self.on_exit_codes is not None:
            return exit_code in self.on_exit_codes.values
        return any(each.type in conditions for each in self.on_pod_conditions or ())


class FailurePolicy(Part):
    """The rules, of which the first that matches counts."""

    rules: list[FailureRule]


class SuccessRule(Part):
    """When a job has succeeded."""

    succeeded_count: int = Field(ge=1)


class SuccessPolicy(Part):
    """When a job has succeeded."""

    rules: tuple[SuccessRule]


class JobSpec(Part):
    """An Indexed Job with one pod for each index at a time."""

    completion_mode: Literal["Indexed"]
    parallelism: int
    completions: int
    template: PodTemplate
    backoff_limit_per_index: int
    max_failed_indexes: int
    pod_replacement_policy: Literal["Failed"]
    pod_failure_policy: FailurePolicy
    success_policy: SuccessPolicy

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.parallelism != self.completions:
            raise ValueError("parallelism and completions must be equal: pods are scaled by both at once")
        if self.template.spec.restart_policy != "Never":
            raise ValueError("restartPolicy must be Never where there is a podFailurePolicy")
        return self


class Job(Part):
    """A Job."""

    api_version: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


# ---- services


class Selector(Part):
    """Which pods are meant."""

    match_labels: dict[str, str]


class DeploymentSpec(Part):
    """Pods that are all alike."""

    replicas: int
    selector: Selector
    template: PodTemplate


class Deployment(Part):
    """A Deployment."""

    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class Claim(Part):
    """A PersistentVolumeClaim, whole or as a template."""

    api_version: Any = None
    kind: Any = None
    metadata: Metadata
    spec: Any = None


class StatefulSetSpec(Part):
    """Pods with names and volumes of their own."""

    replicas: int
    service_name: str
    selector: Selector
    template: PodTemplate
    volume_claim_templates: list[Claim]
    pod_management_policy: Literal["Parallel"]


class StatefulSet(Part):
    """A StatefulSet."""

    api_version: Literal["apps/v1"]
    kind: Literal["StatefulSet"]
    metadata: Metadata
    spec: StatefulSetSpec


Controller = Job | Deployment | StatefulSet


class ServicePort(Part):
    """A port of a Service. Names lead straight to pods here, so it must be the pods' own."""

    port: int
    target_port: str
    name: str


class ServiceSpec(Part):
    """A name for some pods, ready or not."""

    selector: dict[str, str]
    ports: list[ServicePort]
    cluster_ip: Literal["None"] | None = Field(default=None, alias="clusterIP")
    publish_not_ready_addresses: Literal[True]


class Service(Part):
    """A Service."""

    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec

    def names(self, hostname: str, container: Container) -> Sequence[str]:
        """By which names a pod of it is found. ConfigError for a port that is another one of the pod."""
        for port in self.spec.ports:
            if container.port(port.target_port) != port.port:
                raise ConfigError(f"Service {self.metadata.name}: port {port.port} leads to another port")
        own = [self.metadata.name]
        if self.spec.cluster_ip == "None":
            own.append(f"{hostname}.{self.metadata.name}")
        namespace = self.metadata.namespace
        return [name + suffix for name in own for suffix in ("", f".{namespace}", f".{namespace}.svc")]


class ConfigMap(Part):
    """A ConfigMap."""

    api_version: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str]


Known = Controller | Service | ConfigMap | Claim
KINDS: dict[str, type[Known]] = {
    "Job": Job,
    "Deployment": Deployment,
    "StatefulSet": StatefulSet,
    "Service": Service,
    "ConfigMap": ConfigMap,
    "PersistentVolumeClaim": Claim,
}


def parsed(document: Mapping[str, Any]) -> Known | None:
    """The object that ``document`` describes; None for a kind without effect."""
    kind = str(document.get("kind"))
    name = document.get("metadata", {}).get("name")
    if kind in WITHOUT_EFFECT:
        return None
    if kind not in KINDS:
        raise ConfigError(f"{kind} {name}: the stand-in knows no objects of this kind")
    try:
        return KINDS[kind].model_validate(dict(document))
    except ValidationError as error:
        raise explain(error, f"{kind} {name}") from error
