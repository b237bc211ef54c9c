"""The stand-in's pods: what they see, how they are probed, and how they are ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.kubelet import images
from tests.support.kubelet.cluster import Cluster, EvictionRefusedError, check_possible
from tests.support.kubelet.job_rules import Condition
from tests.support.kubelet.pods import PodStatus

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]
LIMIT_S = 60.0
RIGHTS = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
USER = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
TERMINATED, KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An empty one."""
    check_possible()
    with Cluster(tmp_path, replacement_delay_s=0.1) as made:
        yield made


def template(words: Sequence[str], pod: dict[str, Any] | None = None, **container: Any) -> dict[str, Any]:
    """A pod that runs ``words``."""
    box = {"name": "c", "image": "elastic-trainer:latest", "command": list(words), "securityContext": RIGHTS}
    spec = {"automountServiceAccountToken": False, "securityContext": USER, "containers": [box | container]}
    return {"metadata": {"labels": {"app": "it"}}, "spec": spec | (pod or {})}


def job(name: str, made: dict[str, Any], size: int = 1, **more: Any) -> dict[str, Any]:
    """A Job of such pods."""
    made["spec"]["restartPolicy"] = "Never"
    spec = {"completionMode": "Indexed", "parallelism": size, "completions": size, "podReplacementPolicy": "Failed"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {**spec, "template": made, "backoffLimitPerIndex": 0, **more},
    }


def thing(kind: str, api: str, name: str, **more: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "ns"}, **more}


def await_pods(cluster: Cluster, owner: str, count: int, **wanted: Any) -> list[PodStatus]:
    """Wait for ``count`` living pods with these values in their statuses."""

    def found() -> list[PodStatus]:
        return [pod for pod in cluster.living(owner) if all(getattr(pod, k) == v for k, v in wanted.items())]

    cluster.wait_for(lambda: len(found()) == count, f"no {count} pods of {owner} with {wanted}", LIMIT_S)
    return found()


FILES = ["/file", "/home/trainer/file", "/etc/settings/x", "/tmp/file", "/dev/shm/file", "/data/file", "/usr/file"]
NAMES = ["web", "web.ns.svc.cluster.local", "web-0.web", "seeing-0", "nobody"]


def test_a_pod_sees_what_its_specification_says(cluster: Cluster) -> None:
    """Its variables, words, user, names, files and limits; it can write where there is a volume, and nowhere else."""
    labels = {"app": "web"}
    web = template(["python", "-c", "import time; time.sleep(600)"], ports=[{"name": "http", "containerPort": 80}])
    web["metadata"]["labels"] = labels
    script = Path(__file__).with_name("seeing.py").read_text()
    seeing = template(
        ["python", "-I", "-c", script, ",".join(FILES), ",".join(NAMES)],
        {
            "volumes": [
                {"name": "settings", "configMap": {"name": "settings"}},
                {"name": "secrets", "secret": {"secretName": "secrets", "items": [{"key": "a", "path": "b"}]}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            ]
        },
        args=["--at=$(POD_IP):$(PORT)"],
        envFrom=[{"configMapRef": {"name": "settings"}}],
        env=[{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        volumeMounts=[
            {"name": "settings", "mountPath": "/etc/settings"},
            {"name": "secrets", "mountPath": "/etc/secrets"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "data", "mountPath": "/data"},
        ],
    )
    ports = [{"port": 80, "targetPort": "http"}]
    cluster.apply(
        [
            thing("Service", "v1", "web", spec={"clusterIP": "None", "selector": labels, "ports": ports}),
            thing(
                "StatefulSet",
                "apps/v1",
                "web",
                spec={"serviceName": "web", "selector": {"matchLabels": labels}, "template": web},
            ),
            thing("ConfigMap", "v1", "settings", data={"PORT": "2379", "key": "value"}),
            thing("Secret", "v1", "secrets", stringData={"a": "hidden", "c": "not asked for"}),
            thing("PersistentVolumeClaim", "v1", "data"),
        ]
    )
    (server,) = await_pods(cluster, "StatefulSet/web", 1, ready=True)
    cluster.apply([job("seeing", seeing)])
    cluster.wait_for(lambda: cluster.job("seeing").over, "the pod does not end", LIMIT_S)
    (pod,) = cluster.pods("Job/seeing")
    assert cluster.job("seeing").condition is Condition.COMPLETE, cluster.describe()
    seen = json.loads(cluster.log(pod.name).splitlines()[-1])

    assert seen["words"][2:] == [f"--at={pod.address}:2379"]
    assert seen["environment"]["JOB_COMPLETION_INDEX"] == "0"
    assert seen["environment"]["HOME"] == seen["directory"] == images.HOME
    assert "PYTEST_CURRENT_TEST" not in seen["environment"]
    assert (seen["host"], seen["pid"]) == ("seeing-0", 1)
    assert seen["settings"] == {"PORT": "2379", "key": "value"}
    assert seen["secrets"] == {"b": "hidden"}
    assert seen["memory"] == 4 * 2**20
    same = dict.fromkeys(["web", "web.ns.svc.cluster.local", "web-0.web"], server.address)
    assert seen["addresses"] == {**same, "seeing-0": pod.address, "nobody": ""}
    assert seen["writable"] == ["/tmp/file", "/dev/shm/file", "/data/file"]
    assert (cluster.claim("data") / "file").read_text() == "here"
    if not images.image("elastic-trainer:latest").unreadable:
        assert seen["user"] == [10001, 10001, [10001]]


SERVING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(600)
"""
EMPTY = {"volumes": [{"name": "tmp", "emptyDir": {}}]}
MOUNTED = [{"name": "tmp", "mountPath": "/tmp"}]


def test_probes_make_pods_ready_and_restart_containers(cluster: Cluster) -> None:
    """Readiness follows its probe; two bad answers about liveness end the container by SIGTERM, and the pod starts it
    again, with its volumes. Evictions stop at what a disruption budget protects."""
    quick = {"periodSeconds": 0.1, "failureThreshold": 2, "timeoutSeconds": 20}
    made = template(
        ["python", "-I", "-S", "-c", SERVING],  # its own /dev/shm is new each time, /tmp is the pod's
        EMPTY,
        volumeMounts=MOUNTED,
        readinessProbe={"exec": {"command": ["test", "-e", "/tmp/ready"]}, **quick},
        livenessProbe={"exec": {"command": ["test", "!", "-e", "/dev/shm/sick"]}, **quick},
    )
    selector = {"matchLabels": {"app": "it"}}
    cluster.apply(
        [
            thing("Deployment", "apps/v1", "it", spec={"selector": selector, "template": made}),
            thing("PodDisruptionBudget", "policy/v1", "it", spec={"minAvailable": 1, "selector": selector}),
        ]
    )
    (pod,) = await_pods(cluster, "Deployment/it", 1, phase="Running")
    cluster.wait_for(lambda: "readiness" in cluster.pod(pod.name).trouble, "nobody asks whether it is ready", LIMIT_S)
    assert not cluster.pod(pod.name).ready
    assert cluster.execute(pod.name, "touch", "/tmp/ready").returncode == 0
    cluster.wait_for(lambda: cluster.pod(pod.name).ready, "it does not get ready", LIMIT_S)
    with pytest.raises(EvictionRefusedError):
        cluster.evict(pod.name)
    cluster.execute(pod.name, "touch", "/dev/shm/sick")
    cluster.wait_for(lambda: cluster.pod(pod.name).restarts == 1, "it is not restarted", LIMIT_S)
    cluster.wait_for(lambda: cluster.pod(pod.name).ready, "it does not get ready again", LIMIT_S)
    cluster.wait_for(lambda: cluster.log(pod.name).count("up") == 2, "it does not start again", LIMIT_S)
    cluster.execute(pod.name, "rm", "/tmp/ready")
    cluster.wait_for(lambda: not cluster.pod(pod.name).ready, "it stays ready", LIMIT_S)
    cluster.evict(pod.name)
    (other,) = await_pods(cluster, "Deployment/it", 1, restarts=0, phase="Running")
    assert cluster.pod(pod.name).exit_code == 0
    assert other.name != pod.name


LEAVING = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('up'); time.sleep(600)"
DEAF = "import time; print('up'); time.sleep(600)"
STUBBORN = """
import signal, subprocess, time
signal.signal(15, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("script", "shared", "code"),
    [
        (LEAVING, False, TERMINATED),
        (LEAVING, True, TERMINATED),
        (DEAF, False, KILLED),
        (DEAF, True, TERMINATED),
        (STUBBORN, False, KILLED),
        (STUBBORN, True, KILLED),
    ],
)
def test_pods_are_told_to_go_and_killed_in_the_end(cluster: Cluster, script: str, shared: bool, code: int) -> None:
    """SIGTERM ends who listens, and who does not is killed when its grace period is over, with all that it started.
    Process 1 of a container must listen by itself; where the pod's processes are shared, the default action counts."""
    grace_s = 1 if code == KILLED else LIMIT_S  # a slow machine must not decide who listens
    pod = {"terminationGracePeriodSeconds": grace_s, "shareProcessNamespace": shared}
    cluster.apply([job("it", template(["python", "-u", "-I", "-S", "-c", script], pod))])
    (it,) = await_pods(cluster, "Job/it", 1, phase="Running")
    cluster.wait_for(lambda: "up" in cluster.log(it.name), "it does not start", LIMIT_S)
    processes = cluster.processes(it.name)
    cluster.delete_pod(it.name)
    cluster.wait_for(lambda: not cluster.pod(it.name).living, "it does not end", LIMIT_S)
    ended = cluster.pod(it.name)
    assert (ended.phase, ended.exit_code) == ("Failed", code)
    assert ended.leaving is not None
    assert ended.leaving.killed is (code == KILLED)
    assert len(processes) == (2 if script is STUBBORN else 1)
    _, alive = psutil.wait_procs(processes, LIMIT_S)
    assert alive == []


def test_a_job_is_scaled_suspended_and_resumed(cluster: Cluster) -> None:
    """Its pods come and go with its numbers; those that were told to go count as no failures."""
    policy = {"rules": [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [TERMINATED]}}]}
    made = template(["python", "-u", "-I", "-S", "-c", LEAVING])
    cluster.apply([job("it", made, 1, podFailurePolicy=policy)])

    def up(count: int) -> list[int]:
        pods = await_pods(cluster, "Job/it", count, phase="Running", deleting=False)
        cluster.wait_for(lambda: all("up" in cluster.log(pod.name) for pod in pods), "they do not start", LIMIT_S)
        return [pod.index for pod in pods]

    assert up(1) == [0]
    cluster.patch("Job", "it", {"spec": {"parallelism": 3, "completions": 3}})
    assert up(3) == [0, 1, 2]
    cluster.patch("Job", "it", {"spec": {"parallelism": 2, "completions": 2}})
    cluster.wait_for(lambda: len(cluster.living("Job/it")) == 2, "nobody leaves", LIMIT_S)
    assert up(2) == [0, 1]
    cluster.patch("Job", "it", {"spec": {"suspend": True}})
    cluster.wait_for(lambda: cluster.living("Job/it") == [], "they do not leave", LIMIT_S)
    assert cluster.job("it").condition is Condition.SUSPENDED
    cluster.patch("Job", "it", {"spec": {"suspend": False}})
    assert up(2) == [0, 1]
    assert cluster.job("it").failures == {}
