"""The Kubernetes objects that the stand-in knows, field by field; any other field or kind is an error.

*Fails by* ConfigError that names object and field. Fields of type ``Any`` are known and have no effect here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import explain
from tests.support.kubelet.pod_spec import Metadata, Part, PodTemplate, Selector

WITHOUT_EFFECT = frozenset({"Namespace", "ServiceAccount", "NetworkPolicy", "PodMonitor", "PrometheusRule"})
"""Kinds that change nothing for the processes of one node."""


class OnExitCodes(Part):
    """A rule's condition on the exit code."""

    operator: Literal["In", "NotIn"]
    values: list[int] = Field(min_length=1)
    container_name: str | None = None

    def matches(self, code: int) -> bool:
        """Whether a container that failed with ``code`` is meant."""
        return (code in self.values) == (self.operator == "In")


class PodCondition(Part):
    """A pod's condition of this type and status."""

    type: str
    status: Literal["True"] = "True"


class FailureRule(Part):
    """What a pod's failure means."""

    action: Literal["FailJob", "Ignore", "Count", "FailIndex"]
    on_exit_codes: OnExitCodes | None = None
    on_pod_conditions: list[PodCondition] | None = None

    @model_validator(mode="after")
    def _one_condition(self) -> FailureRule:
        if (self.on_exit_codes is None) == (self.on_pod_conditions is None):
            raise ValueError("a rule has one of onExitCodes and onPodConditions")
        return self


class FailurePolicy(Part):
    """The rules, of which the first that matches counts."""

    rules: list[FailureRule]


class SuccessRule(Part):
    """When a job has succeeded."""

    succeeded_count: int = Field(ge=1)


class SuccessPolicy(Part):
    """Any of these rules will do."""

    rules: list[SuccessRule] = Field(min_length=1)


class JobSpec(Part):
    """An Indexed Job with one pod for each index at a time."""

    completion_mode: Literal["Indexed"]
    parallelism: int = Field(ge=0)
    completions: int = Field(ge=0)
    template: PodTemplate
    suspend: bool = False
    backoff_limit: int | None = None
    backoff_limit_per_index: int | None = None
    max_failed_indexes: int | None = None
    pod_replacement_policy: Literal["Failed"]
    pod_failure_policy: FailurePolicy = FailurePolicy(rules=[])
    success_policy: SuccessPolicy | None = None
    ttl_seconds_after_finished: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.parallelism != self.completions:
            raise ValueError("parallelism and completions must be equal: pods are scaled by both at once")
        if self.template.spec.restart_policy != "Never":
            raise ValueError("restartPolicy must be Never where there is a podFailurePolicy")
        if self.max_failed_indexes is not None and self.backoff_limit_per_index is None:
            raise ValueError("maxFailedIndexes goes with backoffLimitPerIndex")
        return self


class Job(Part):
    """A Job."""

    api_version: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


# ---- services


class DeploymentSpec(Part):
    """Pods that are all alike."""

    replicas: int = 1
    selector: Selector
    template: PodTemplate
    strategy: Any = None
    revision_history_limit: Any = None


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

    replicas: int = 1
    service_name: str
    selector: Selector
    template: PodTemplate
    volume_claim_templates: list[Claim] = Field(default_factory=list)
    pod_management_policy: Literal["OrderedReady", "Parallel"] = "OrderedReady"
    update_strategy: Any = None
    persistent_volume_claim_retention_policy: Any = None


class StatefulSet(Part):
    """A StatefulSet."""

    api_version: Literal["apps/v1"]
    kind: Literal["StatefulSet"]
    metadata: Metadata
    spec: StatefulSetSpec


class ServicePort(Part):
    """A port of a Service. Names lead straight to pods here, so it must be the pods' own."""

    port: int
    target_port: int | str | None = None
    name: str = ""
    protocol: Literal["TCP"] = "TCP"


class ServiceSpec(Part):
    """A name for some pods."""

    selector: dict[str, str]
    ports: list[ServicePort] = Field(default_factory=list)
    cluster_ip: str | None = Field(default=None, alias="clusterIP")
    publish_not_ready_addresses: bool = False
    type: Literal["ClusterIP"] = "ClusterIP"


class Service(Part):
    """A Service."""

    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec

    @property
    def headless(self) -> bool:
        """Whether its name stands for all its pods, without an address of its own."""
        return self.spec.cluster_ip == "None"


class BudgetSpec(Part):
    """How many pods evictions must leave."""

    min_available: int
    selector: Selector
    unhealthy_pod_eviction_policy: Any = None


class Budget(Part):
    """A PodDisruptionBudget."""

    api_version: Literal["policy/v1"]
    kind: Literal["PodDisruptionBudget"]
    metadata: Metadata
    spec: BudgetSpec


class ConfigMap(Part):
    """A ConfigMap."""

    api_version: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str] = Field(default_factory=dict)
    immutable: Any = None


class Secret(Part):
    """A Secret: ``data`` in base64, ``stringData`` as it is."""

    api_version: Literal["v1"]
    kind: Literal["Secret"]
    metadata: Metadata
    data: dict[str, str] = Field(default_factory=dict)
    string_data: dict[str, str] = Field(default_factory=dict)
    type: Any = None
    immutable: Any = None


Known = Job | Deployment | StatefulSet | Service | Budget | ConfigMap | Secret | Claim
KINDS: dict[str, type[Known]] = {
    "Job": Job,
    "Deployment": Deployment,
    "StatefulSet": StatefulSet,
    "Service": Service,
    "PodDisruptionBudget": Budget,
    "ConfigMap": ConfigMap,
    "Secret": Secret,
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
