"""What the stand-in accepts, and what it refuses because it would have to ignore it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.cluster import merged
from tests.support.kubelet.objects import Job, parsed
from tests.support.kubelet.pod_spec import quantity

JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "j"},
    "spec": {
        "completionMode": "Indexed",
        "parallelism": 2,
        "completions": 2,
        "podReplacementPolicy": "Failed",
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "containers": [{"name": "c", "image": "i", "command": ["true"]}],
            }
        },
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The Job with one field set."""
    document = copy.deepcopy(JOB)
    *parts, last = path.split(".")
    place: Any = document
    for part in parts:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    return document


def test_a_job_is_understood() -> None:
    """The smallest one that is taken."""
    assert isinstance(parsed(JOB), Job)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.managedBy", "x"),
        ("spec.activeDeadlineSeconds", 5),
        ("spec.completions", 3),
        ("spec.completionMode", "NonIndexed"),
        ("spec.podReplacementPolicy", "TerminatingOrFailed"),
        ("spec.maxFailedIndexes", 1),
        ("spec.template.spec.restartPolicy", "OnFailure"),
        ("spec.template.spec.initContainers", []),
        ("spec.template.spec.automountServiceAccountToken", True),
        ("spec.template.spec.containers.0.lifecycle", {}),
        ("spec.template.spec.containers.0.livenessProbe", {"grpc": {"port": 1}}),
        ("spec.template.spec.containers.0.livenessProbe", {"periodSeconds": 1}),
        ("spec.template.spec.volumes", [{"name": "v", "hostPath": {"path": "/"}}]),
        ("spec.podFailurePolicy", {"rules": [{"action": "Ignore"}]}),
        ("spec.successPolicy", {"rules": [{"succeededIndexes": "0"}]}),
        ("kind", "CronJob"),
    ],
)
def test_what_it_does_not_play_is_an_error(path: str, value: Any) -> None:
    """Never ignored: a test would prove what no cluster does."""
    with pytest.raises(ConfigError):
        parsed(changed(path, value))


def test_kinds_that_change_no_process_are_passed_over() -> None:
    """Say a NetworkPolicy."""
    assert parsed({"kind": "NetworkPolicy", "metadata": {"name": "n"}, "anything": 1}) is None


def test_quantities() -> None:
    """Binary and decimal."""
    assert [quantity(text) for text in ("64Mi", "1Gi", "5k", "7", 8)] == [64 * 2**20, 2**30, 5000, 7, 8]
    with pytest.raises(ConfigError):
        quantity("1.5X")


def test_merge_patches() -> None:
    """RFC 7386: values replace, null removes, lists are not merged."""
    document = {"a": {"b": 1, "c": 2}, "l": [1, 2], "x": 1}
    patch = {"a": {"b": 3, "d": {"e": 4}}, "l": [9], "x": None}
    assert merged(document, patch) == {"a": {"b": 3, "c": 2, "d": {"e": 4}}, "l": [9]}
