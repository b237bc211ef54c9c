"""A rendered overlay on the stand-in: what its job does, read from the ledger that its workers write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.ledger import LedgerTail, Line, LineKind
from elastic_trainer.variables import ENV_LEDGER_DIR
from tests.support import manifests
from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.pods import Condition, Pod
from tests.support.manifests import Manifest, named
from tests.support.requirements import needs

JOB, OWNER = "mnist", "Job/mnist"
LIMIT_S = 120.0
"""How long anything may take on a slow machine before a test fails."""
LEDGER = "/checkpoints/ledger"


def rendered() -> list[Manifest]:
    needs("dumb-init", "the init of the image")
    return manifests.rendered("overlays/dev")


def change_job_file(documents: list[Manifest], changes: Mapping[str, Any]) -> None:
    data = named(documents, "ConfigMap", JOB)["data"]
    data["job.yaml"] = yaml.safe_dump(yaml.safe_load(data["job.yaml"]) | dict(changes))


def add_options(documents: list[Manifest], **options: str) -> None:
    words = named(documents, "Job", JOB)["spec"]["template"]["spec"]["containers"][0]["command"]
    at = next(number for number, word in enumerate(words) if word.startswith("--rdzv-conf="))
    words[at] += "".join(f",{name}={value}" for name, value in options.items())


def check_left(pod: Pod, grace_s: float = 90.0) -> None:
    """It went when it was told to, by itself and in time."""
    assert pod.exit_code == EXIT_LEFT, pod
    assert not pod.killed
    assert pod.left_after_s is not None
    assert pod.left_after_s < grace_s


class Scene:
    """The job of an overlay in a cluster, and what its workers wrote."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._tail = LedgerTail(cluster.claim("checkpoints") / "ledger")
        self.lines: list[Line] = []

    def start(self, documents: list[Manifest]) -> None:
        named(documents, "ConfigMap", "elastic-trainer")["data"][ENV_LEDGER_DIR] = LEDGER
        self.cluster.apply(documents)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        self.cluster.wait_for(condition, what, limit_s)

    # ---- pods

    def living(self) -> list[Pod]:
        return self.cluster.living(OWNER)

    def scale(self, size: int) -> None:
        self.cluster.scale(JOB, size)

    def await_end(self, name: str) -> Pod:
        self.wait_for(lambda: not self.cluster.pod(name).living, f"{name} does not end")
        return self.cluster.pod(name)

    def await_over(self) -> Condition | None:
        self.wait_for(lambda: self.cluster.job(JOB).condition is not None, "the Job is never over")
        return self.cluster.job(JOB).condition

    # ---- steps

    def steps(self) -> list[Line]:
        self.lines += self._tail.read()
        return [line for line in self.lines if line.event is LineKind.STEP]

    def await_world(self, size: int, *, after: int = 0, count: int = 3) -> int:
        """Wait until just the ``size`` living pods have made ``count`` steps together; their round.

        ``after``: in a round later than that.
        """
        found: list[int] = []

        def together() -> bool:
            here = {pod.name for pod in self.living()}
            made: dict[int, dict[str, int]] = {}
            for line in self.steps():
                if line.round > after and line.world == size:
                    nodes = made.setdefault(line.round, {})
                    nodes[line.node] = nodes.get(line.node, 0) + 1
            found[:] = [number for number, nodes in made.items() if set(nodes) == here and min(nodes.values()) >= count]
            return bool(found) and len(here) == size

        self.wait_for(together, f"no {size} pods train together after round {after}")
        return max(found)

    # ---- what a person in a pod sees

    def asked(self, pod: str, *words: str) -> str:
        done = self.cluster.execute(pod, *words)
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def fetched(self, pod: str, url: str) -> str:
        script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
        return self.asked(pod, "python", "-c", script, url)

    def happenings(self, pod: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.asked(pod, "elastic-trainer", "events", JOB, "--json").splitlines()]
