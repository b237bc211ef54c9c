"""How pods of the job end, and what the Job makes of it: by its own policies, with real torchruns."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT, EXIT_UNFIT
from tests.drills.kubernetes import paced
from tests.drills.kubernetes.scene import JOB, OWNER, Scene, add_options, change_job_file, check_left, rendered
from tests.support.kubelet.cluster import Cluster, check_possible
from tests.support.kubelet.jobs import Condition
from tests.support.kubelet.pods import Phase, PodStatus
from tests.support.manifests import Manifest, named

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    check_possible()
    with Cluster(tmp_path, replacement_delay_s=1.0) as cluster:
        yield Scene(cluster)


def without_monitor() -> list[Manifest]:
    """The dev overlay but for what these tests do not look at: the monitor, and warm starts of a second worker."""
    documents = [document for document in rendered() if document["kind"] != "Deployment"]
    add_options(documents, preload="off")
    return documents


def check_failed_at_once(scene: Scene, sentence: str) -> None:
    """The Job is Failed by its rule about wrong configurations, after the first pods, which said why."""
    assert scene.await_over() is Condition.FAILED
    assert scene.cluster.job(JOB).reason.startswith("PodFailurePolicy")
    pods = scene.cluster.all_pods(OWNER)
    assert sorted(pod.index for pod in pods) == [0, 1], pods
    # Whoever was told to go while its interpreter ended says more than it would say by itself.
    guilty = [pod for pod in pods if pod.exit_code == EXIT_CONFIG and pod.leaving is None]
    assert guilty, pods
    assert {pod.exit_code for pod in pods} <= {EXIT_CONFIG, EXIT_LEFT}, pods
    assert sentence in scene.cluster.log(guilty[0].name)
    assert "Traceback" not in scene.cluster.log(guilty[0].name)


def test_a_wrong_option_fails_the_job_without_a_retry(scene: Scene) -> None:
    """A rendezvous option that does not exist."""
    documents = without_monitor()
    add_options(documents, tll="3")
    scene.start(documents)
    check_failed_at_once(scene, "--rdzv-conf: unknown key 'tll'")


def test_a_wrong_job_file_fails_the_job_without_a_retry(scene: Scene) -> None:
    """A key that the job's YAML does not know: found by the workers, passed on by torchrun."""
    documents = without_monitor()
    change_job_file(documents, {"epochz": 3})
    scene.start(documents)
    check_failed_at_once(scene, "unknown key 'epochz'")


def test_pods_on_unfit_machines_are_replaced(scene: Scene) -> None:
    """Refused by pre-flight, each ends with 71 and is replaced; the replacements find what was wrong mended, and the
    Job completes."""
    documents = without_monitor()
    add_options(documents, preflight="refuse", preflight_dir="/checkpoints/data")
    change_job_file(documents, {"epochs": 1})
    data = scene.cluster.claim("checkpoints") / "data"
    data.mkdir(parents=True)
    data.chmod(0o555)
    scene.start(documents)
    scene.wait_for(lambda: len(scene.cluster.job(JOB).failures) == 2, "nobody finds the machines unfit")
    first = [pod for pod in scene.cluster.all_pods(OWNER) if not pod.living]
    assert {pod.exit_code for pod in first} == {EXIT_UNFIT}, first
    data.chmod(0o777)
    assert scene.await_over() is Condition.COMPLETE
    assert scene.cluster.job(JOB).failed == set()


def test_pods_are_evicted_before_they_train(scene: Scene) -> None:
    """One that has just been started, and one that waits for etcd: both leave at once with 143, and are replaced."""
    documents = [document for document in without_monitor() if document["kind"] != "StatefulSet"]
    scene.start(documents)
    scene.wait_for(lambda: sum(begun(scene, pod) for pod in scene.living()) == 2, "no pods")
    loading, waiting = scene.living()
    scene.cluster.evict(loading.name)
    scene.wait_for(lambda: has_loaded(scene, waiting.name, "grpc"), "it does not look for etcd")
    scene.cluster.evict(waiting.name)
    for name in (loading.name, waiting.name):
        check_left(scene.await_end(name))
    scene.wait_for(lambda: len(scene.living()) == 2, "they are not replaced")
    assert scene.cluster.job(JOB).failures == {}


def begun(scene: Scene, pod: PodStatus) -> bool:
    """Whether torchrun's process is there: before that, for milliseconds, process 1 of a container misses a SIGTERM."""
    return pod.phase is Phase.RUNNING and len(scene.cluster.processes(pod.name)) > 1


def has_loaded(scene: Scene, name: str, library: str) -> bool:
    """Whether a process of the pod has a library of this package in memory."""
    found = scene.cluster.processes(name)
    return any(f"/{library}/" in each.path for process in found for each in process.memory_maps())


def test_a_pod_that_stands_still_is_killed_when_its_time_is_over(scene: Scene) -> None:
    """It cannot answer, so nothing but the end of the grace period ends it; the others go on without it, and its
    eviction counts as no failure."""
    documents = without_monitor()
    change_job_file(documents, {"task": paced.NAME})
    named(documents, "Job", JOB)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    scene.start(documents)
    round_ = scene.await_world(2)
    frozen, other = scene.living()
    scene.wait_for(lambda: scene.cluster.pod(frozen.name).ready and scene.cluster.pod(other.name).ready, "not ready")
    for pid in scene.cluster.processes(frozen.name):
        pid.suspend()
    scene.cluster.evict(frozen.name)
    ended = scene.await_end(frozen.name)
    assert ended.exit_code == 128 + signal.SIGKILL
    assert ended.leaving is not None
    assert ended.leaving.killed
    assert ended.leaving.took_s >= 5.0
    scene.await_world(2, after=round_)
    assert scene.cluster.job(JOB).failures == {}
    assert scene.living()[1].name == other.name
