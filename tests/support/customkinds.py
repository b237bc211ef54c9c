"""The kinds of operators that the manifests use, as JSON schemas: kubernetes-validate knows none of them.

Kept by hand: only the fields that are used here, all others are errors, so a misspelled one is found. Compared once
with the operators' own definitions (prometheus-operator, cert-manager 1.x, JobSet v1alpha2, Kubeflow Trainer 2.3).
The Jobs in them are judged as Jobs of Kubernetes itself; see ``manifests.jobs``.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
WHOLE: Schema = {"type": "integer", "minimum": 1}
SECONDS: Schema = {"type": "string", "pattern": r"^[0-9]+s$"}
HOURS: Schema = {"type": "string", "pattern": r"^[0-9]+h$"}
ANY: Schema = {"type": "object"}


def _of(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    properties = required | optional
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = _of({"name": TEXT}, namespace=TEXT, labels=LABELS, annotations=LABELS)
RULE: Schema = {
    **_of(
        {"expr": TEXT},
        record={"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
        alert=TEXT,
        **{"for": {"type": "string"}, "keep_firing_for": {"type": "string"}},
        labels=LABELS,
        annotations=LABELS,
    ),
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
}
RELABELING = _of({"targetLabel": TEXT, "replacement": TEXT, "action": {"const": "replace"}})
ENDPOINT = _of(
    {"port": TEXT},
    interval=SECONDS,
    scrapeTimeout=SECONDS,
    honorLabels={"type": "boolean"},
    relabelings=_list(RELABELING),
)
ISSUER = _of({"name": TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}})
KEY = _of(
    {"algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]}, "size": WHOLE}, rotationPolicy={"enum": ["Always", "Never"]}
)
USAGE: Schema = {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}
REPLICATED = _of(
    {"name": TEXT, "template": _of({"spec": ANY}, metadata=_of({"labels": LABELS}))},
    replicas=WHOLE,
)
JOB_SET = _of(
    {"replicatedJobs": _list(REPLICATED)},
    network=_of({"enableDNSHostnames": {"type": "boolean"}}),
)

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _of(
        {"selector": _of({"matchLabels": LABELS}), "podMetricsEndpoints": _list(ENDPOINT)}
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _of({"groups": _list(_of({"name": TEXT, "rules": _list(RULE)}))}),
    ("cert-manager.io/v1", "Issuer"): {
        **_of({}, selfSigned={"const": {}}, ca=_of({"secretName": TEXT})),
        "minProperties": 1,
        "maxProperties": 1,
    },
    ("cert-manager.io/v1", "Certificate"): {
        **_of(
            {"secretName": TEXT, "issuerRef": ISSUER, "duration": HOURS, "privateKey": KEY},
            isCA={"type": "boolean"},
            commonName=TEXT,
            dnsNames=_list(TEXT),
            ipAddresses=_list(TEXT),
            usages=_list(USAGE),
            renewBefore=HOURS,
        ),
        "anyOf": [{"required": ["commonName"]}, {"required": ["dnsNames"]}],
    },
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOB_SET,
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): _of(
        {"template": _of({"spec": JOB_SET})}, mlPolicy=_of({"numNodes": WHOLE})
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): _of(
        {"runtimeRef": _of({"name": TEXT}, apiGroup=TEXT, kind=TEXT)},
        trainer=_of({}, numNodes=WHOLE, args=_list(TEXT)),
    ),
}
"""What ``spec`` of each kind may say."""
CLUSTER_WIDE = {"ClusterTrainingRuntime"}
"""Kinds that have no namespace."""


def is_known(manifest: dict[str, Any]) -> bool:
    """Whether there is a schema for this kind."""
    return (manifest["apiVersion"], manifest["kind"]) in SPECS


def mistakes(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with an object of one of these kinds."""
    spec = SPECS[manifest["apiVersion"], manifest["kind"]]
    whole = _of({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec})
    found = [f"{error.json_path}: {error.message}" for error in Draft202012Validator(whole).iter_errors(manifest)]
    if manifest["kind"] in CLUSTER_WIDE and "namespace" in manifest["metadata"]:
        found.append("$.metadata.namespace: this kind belongs to no namespace")
    return found
