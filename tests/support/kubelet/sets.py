"""Which pods Deployments and StatefulSets want, and who the pods of all controllers are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.kubelet.objects import Deployment, Job, StatefulSet
from tests.support.kubelet.pod_spec import PodTemplate
from tests.support.kubelet.pods import Identity, PodStatus

JOB_INDEX = "batch.kubernetes.io/job-completion-index"


def owner(thing: Deployment | StatefulSet | Job) -> str:
    """The name of a controller among all."""
    return f"{thing.kind}/{thing.metadata.name}"


def wanted(thing: Deployment | StatefulSet, pods: Sequence[PodStatus]) -> tuple[list[int], list[str]]:
    """Numbers of the pods to make now, and names of those to delete, ``pods`` being those that it has."""
    present = {pod.index for pod in pods}
    missing = [number for number in range(thing.spec.replicas) if number not in present]
    surplus = [pod.name for pod in pods if pod.index >= thing.spec.replicas and not pod.deleting]
    if isinstance(thing, StatefulSet) and thing.spec.pod_management_policy == "OrderedReady":
        missing = missing[:1] if all(pod.ready for pod in pods) else []
    return missing, surplus


def identity(thing: Deployment | StatefulSet | Job, number: int, suffix: str) -> Identity:
    """Who the pod ``number`` of ``thing`` is; ``suffix`` tells it from the one before it."""
    name, template = thing.metadata.name, thing.spec.template
    if isinstance(thing, Job):
        return _job_pod(thing, number, suffix)
    if isinstance(thing, Deployment):
        return _identity(thing, f"{name}-{suffix}", f"{name}-{suffix}", number)
    pod = f"{name}-{number}"
    claims = {claim.metadata.name: f"{claim.metadata.name}-{pod}" for claim in thing.spec.volume_claim_templates}
    labels = {**template.metadata.labels, "statefulset.kubernetes.io/pod-name": pod}
    return Identity(
        pod, thing.metadata.namespace, owner(thing), pod, number, labels, template.metadata.annotations, claims=claims
    )


def _identity(thing: Deployment, pod: str, hostname: str, number: int) -> Identity:
    meta = thing.spec.template.metadata
    return Identity(pod, thing.metadata.namespace, owner(thing), hostname, number, meta.labels, meta.annotations)


def _job_pod(job: Job, index: int, suffix: str) -> Identity:
    name, meta = job.metadata.name, job.spec.template.metadata
    return Identity(
        name=f"{name}-{index}-{suffix}",
        namespace=job.metadata.namespace,
        owner=owner(job),
        hostname=f"{name}-{index}",
        index=index,
        labels={**meta.labels, "batch.kubernetes.io/job-name": name, "job-name": name, JOB_INDEX: str(index)},
        annotations={**meta.annotations, JOB_INDEX: str(index)},
        environment={"JOB_COMPLETION_INDEX": str(index)},
    )


def subdomain(thing: Deployment | StatefulSet | Job, template: PodTemplate) -> str:
    """The headless Service under which its pods have names of their own."""
    return thing.spec.service_name if isinstance(thing, StatefulSet) else template.spec.subdomain
