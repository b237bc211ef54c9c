"""``kubectl kustomize k8s/overlays/dev`` trains: scaled, with pods evicted and killed; each ending is understood."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT, EXIT_UNFIT
from elastic_trainer.local.ledger import audit
from elastic_trainer.model import Cause
from tests.drills.kubernetes import paced
from tests.drills.kubernetes.scene import JOB, OWNER, Scene, add_options, change_job_file, check_left, rendered
from tests.support.kubelet.cluster import Cluster, check_possible
from tests.support.kubelet.pods import DISRUPTED, UID, Condition, image
from tests.support.manifests import Manifest

TRAINING_SAMPLES = 4000
EPOCHS = 4
KILLED = 128 + signal.SIGKILL


@pytest.mark.root
@pytest.mark.timeout(600)
def test_an_elastic_job_from_start_to_completion(tmp_path: Path) -> None:
    """Two pods, four, three; one is evicted, one killed, etcd's container ends and is started again. The Job completes
    by its success policy: every sample of every epoch counted once, and no committed step was made twice. The monitor
    answers by its Service's name throughout. The job's own file is used but for the pace and the number of epochs, its
    options but for warm starts: no worker of a pod is started twice."""
    check_possible()
    documents = rendered()
    change_job_file(documents, {"task": paced.NAME, "epochs": EPOCHS})
    add_options(documents, preload="off")
    with Cluster(tmp_path, replacement_delay_s=1.0) as cluster:
        scene = Scene(cluster)
        scene.start(documents)
        round_ = scene.await_world(2)
        check_user(scene)

        scene.scale(4)
        round_ = scene.await_world(4, after=round_)

        scene.scale(3)
        surplus = next(pod for pod in scene.living() if pod.index == 3)
        check_left(scene.await_end(surplus.name))
        round_ = scene.await_world(3, after=round_)

        evicted = scene.living()[1]
        scene.wait_for(lambda: cluster.pod(evicted.name).ready, "the pod does not get ready")
        cluster.evict(evicted.name)
        check_left(scene.await_end(evicted.name))
        assert DISRUPTED in cluster.pod(evicted.name).conditions
        round_ = scene.await_world(3, after=round_)
        assert cluster.job(JOB).failures == {}

        cluster.send("etcd-0", signal.SIGKILL)
        scene.wait_for(lambda: cluster.pod("etcd-0").restarts == 1 and cluster.pod("etcd-0").ready, "etcd stays away")
        killed = scene.living()[0]
        cluster.send(killed.name, signal.SIGKILL)
        assert scene.await_end(killed.name).exit_code == KILLED
        scene.await_world(3, after=round_)
        assert cluster.job(JOB).failures == {0: 1}

        check_monitor(scene)
        check_story(scene, surplus.name, evicted.name, killed.name)
        (cluster.claim("checkpoints") / paced.HURRY.name).touch()
        assert scene.await_over() is Condition.COMPLETE
        assert cluster.job(JOB).reason == "SuccessPolicy"
        check_ends(cluster, {surplus.name: EXIT_LEFT, evicted.name: EXIT_LEFT, killed.name: KILLED})
    found = audit(scene.steps(), TRAINING_SAMPLES)
    assert found.exact, found.reason
    assert len(found.epochs) == EPOCHS
    assert found.steps_rolled_back <= 1, "more than the step that the killed pod may have committed alone"


def check_user(scene: Scene) -> None:
    """The pods have the rights that their specification leaves them, and nothing more."""
    pod = scene.living()[0].name
    if not image("elastic-trainer:latest").unreadable:
        assert scene.asked(pod, "id", "-u").strip() == str(UID)
    (first, *_) = scene.cluster.processes(pod)
    status = Path(f"/proc/{first.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "CapBnd:\t0000000000000000" in status
    assert scene.cluster.execute(pod, "touch", "/home/trainer/file").returncode != 0


def check_monitor(scene: Scene) -> None:
    """Metrics, the page and what Prometheus is told about the nodes, by the Service's name."""
    pod = scene.living()[0].name

    def shows(path: str, *wanted: str) -> bool:
        text = scene.fetched(pod, f"http://monitor:9470{path}")
        return all(each in text for each in wanted)

    size = f'elastic_trainer_world_size{{run="{JOB}"}} 3'
    scene.wait_for(lambda: shows("/metrics", size), "the monitor does not see three nodes")
    assert "<html" in scene.fetched(pod, f"http://monitor.elastic-trainer.svc:9470/runs/{JOB}")
    nodes = [f"{each.address}:9471" for each in scene.living()]
    scene.wait_for(lambda: shows("/sd/nodes", *nodes), "Prometheus is not told of all nodes")


def check_story(scene: Scene, surplus: str, evicted: str, killed: str) -> None:
    """Each change of the membership is an incident with its cause and its pod."""
    told = [each for each in scene.happenings(scene.living()[0].name) if each.get("cause")]
    causes = {node: each["cause"] for each in told for node in each["nodes"] if each["cause"] != Cause.NODE_JOINED}
    assert causes[surplus] == causes[evicted] == Cause.NODE_LEFT, told
    assert causes[killed] in (Cause.NODE_LOST, Cause.CONTACT_LOST), told


def check_ends(cluster: Cluster, known: dict[str, int]) -> None:
    """How all pods of all times ended: those that nobody interfered with by themselves, with success."""
    ends = {pod.name: pod.exit_code for pod in cluster.all_pods(OWNER)}
    assert {name: code for name, code in ends.items() if name in known} == known
    assert {code for name, code in ends.items() if name not in known} == {0}, ends
    assert not any(pod.killed for pod in cluster.all_pods(OWNER))
    for pod in cluster.pods("Deployment/monitor"):
        assert (pod.restarts, pod.ready) == (0, True)


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


@pytest.mark.parametrize(
    ("options", "job", "sentence"),
    [({"tll": "3"}, {}, "--rdzv-conf: unknown key 'tll'"), ({}, {"epochz": 3}, "unknown key 'epochz'")],
)
def test_a_mistake_fails_the_job_without_a_retry(
    options: dict[str, str], job: dict[str, int], sentence: str, scene: Scene
) -> None:
    """A rendezvous option that does not exist; a key that the job's YAML does not know: found by the workers, passed on
    by torchrun. The Job is Failed by its rule about wrong configurations, after the first pods, which said why."""
    documents = without_monitor()
    add_options(documents, **options)
    change_job_file(documents, job)
    scene.start(documents)
    assert scene.await_over() is Condition.FAILED
    assert scene.cluster.job(JOB).reason.startswith("PodFailurePolicy")
    pods = scene.cluster.all_pods(OWNER)
    assert sorted(pod.index for pod in pods) == [0, 1], pods
    # Whoever was told to go while its interpreter ended says more than it would say by itself.
    guilty = [pod for pod in pods if pod.exit_code == EXIT_CONFIG and pod.left_after_s is None]
    assert guilty, pods
    assert {pod.exit_code for pod in pods} <= {EXIT_CONFIG, EXIT_LEFT}, pods
    assert sentence in scene.cluster.log(guilty[0].name)
    assert "Traceback" not in scene.cluster.log(guilty[0].name)


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
