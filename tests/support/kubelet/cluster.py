"""A cluster of one node in this process: objects are applied, pods run, controllers act, and tests look and interfere.

*Runs in* a thread named ``node``, which lives in a network of its own; tests call from theirs.
*Owns* that thread, the network, all pods and their directories below the one that it is given.
*Fails by* ConfigError for objects that it does not know; what goes wrong in the thread is raised to whoever waits.
*Invariant*: after exit no process of a pod is left.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.local import processes
from elastic_trainer.local.etcd_binary import find_binary
from elastic_trainer.local.hosts import Segment
from tests.support.kubelet import job_rules
from tests.support.kubelet.job_rules import ENDED, OVER, Condition, PodView, Tally
from tests.support.kubelet.objects import (
    Claim,
    ConfigMap,
    Controller,
    Deployment,
    Job,
    Service,
    StatefulSet,
    parsed,
)
from tests.support.kubelet.pods import DISRUPTED, Identity, Pod, PodStatus, Surroundings
from tests.support.requirements import missing, needs, needs_hosts

TICK_S = 0.05
STOP_LIMIT_S = 20.0
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def check_possible() -> None:
    """End the test, as ``requirements`` has it, where pods cannot be played."""
    needs_hosts()
    for program in ("unshare", "setpriv"):
        needs(program, "namespaces for pods")
    try:
        find_binary()
    except ConfigError as error:
        missing(str(error))


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What ``kubectl get job`` would say."""

    condition: Condition | None
    reason: str
    succeeded: frozenset[int]
    failures: Mapping[int, int]
    failed: frozenset[int]

    @property
    def over(self) -> bool:
        """Whether it is Complete or Failed."""
        return self.condition in OVER


def identity(thing: Controller, number: int, suffix: str) -> Identity:
    """Who the pod ``number`` of ``thing`` is; ``suffix`` differs from that of the pod before it."""
    name, labels = thing.metadata.name, thing.spec.template.metadata.labels
    numbered = f"{name}-{number}"
    if isinstance(thing, Job):
        return Identity(f"{numbered}-{suffix}", owner(thing), numbered, number, labels)
    if isinstance(thing, Deployment):
        return Identity(f"{name}-{suffix}", owner(thing), f"{name}-{suffix}", number, labels)
    claims = {claim.metadata.name: f"{claim.metadata.name}-{numbered}" for claim in thing.spec.volume_claim_templates}
    return Identity(numbered, owner(thing), numbered, number, labels, claims)


def owner(thing: Controller) -> str:
    """The name of a controller among all."""
    return f"{thing.kind}/{thing.metadata.name}"


class Cluster:
    """See the module. ``replacement_delay_s``: see job_rules.decide; clusters have 10."""

    def __init__(self, directory: Path, *, replacement_delay_s: float = 10.0) -> None:
        self.directory = directory
        self._delay_s = replacement_delay_s
        self._objects: dict[tuple[str, str], Any] = {}
        self._pods: dict[str, Pod] = {}
        self._past: dict[str, PodStatus] = {}
        self._logs: dict[str, Path] = {}
        self._lives = itertools.count(1)
        self._tallies: dict[str, Tally] = {}
        self._jobs: dict[str, JobStatus] = {}
        self._segment = Segment()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._up = threading.Event()
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="node", daemon=True)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        self._up.wait()
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(STOP_LIMIT_S)
        if self._thread.is_alive():
            raise TimeoutError("the node's thread does not end")
        if kind is None:
            self._check()

    # ---- what kubectl does

    def apply(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Create these objects."""
        with self._lock:
            for document in documents:
                found = parsed(document)
                if found is not None:
                    self._objects[str(document["kind"]), found.metadata.name] = found

    def scale(self, name: str, size: int) -> None:
        """Change the size of a Job, as ``kubectl patch`` does it."""
        with self._lock:
            job = self._objects["Job", name]
            spec = job.spec.model_copy(update={"parallelism": size, "completions": size})
            self._objects["Job", name] = job.model_copy(update={"spec": spec})

    def evict(self, name: str) -> None:
        """Ask for its end as a drain does: no fault of the pod's."""
        with self._lock:
            self._pods[name].conditions |= {DISRUPTED}
            self._pods[name].delete()

    def send(self, name: str, number: signal.Signals) -> None:
        """Signal process 1 of a pod, as something on its machine could."""
        with self._lock:
            process = self._pods[name].process
            if process is None or not process.send(number):
                raise ConfigError(f"pod {name} has no process")

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of a pod."""
        with self._lock:
            process = self._pods[name].process
        return processes.tree(process.pid) if process is not None and process.pid is not None else []

    def execute(self, name: str, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod, as ``kubectl exec`` does."""
        with self._lock:
            process = self._pods[name].process
            if process is None:
                raise ConfigError(f"pod {name} has no process")
            inside, environment = process.inside(words)
        return subprocess.run(
            inside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    # ---- what there is to see

    def pods(self, owner: str = "") -> list[PodStatus]:
        """The pods that there are, of one controller (``Job/mnist``) or of all."""
        with self._lock:
            found = [pod.status() for pod in self._pods.values()]
        return [status for status in found if owner in ("", status.owner)]

    def living(self, owner: str) -> list[PodStatus]:
        """Its pods that have not ended, by index."""
        return sorted((pod for pod in self.pods(owner) if pod.living), key=lambda pod: pod.index)

    def pod(self, name: str) -> PodStatus:
        """One pod, also one that is gone."""
        with self._lock:
            return self._pods[name].status() if name in self._pods else self._past[name]

    def all_pods(self, owner: str) -> list[PodStatus]:
        """Its pods of all times."""
        with self._lock:
            past = [status for status in self._past.values() if status.owner == owner]
        return past + self.pods(owner)

    def job(self, name: str) -> JobStatus:
        """A Job."""
        with self._lock:
            return self._jobs.get(name, JobStatus(None, "", frozenset(), {}, frozenset()))

    def log(self, name: str) -> str:
        """What a pod has printed."""
        return self._logs[name].read_text(encoding="utf-8", errors="replace")

    def claim(self, name: str) -> Path:
        """The directory of a PersistentVolumeClaim."""
        return self.directory / "claims" / name

    def describe(self) -> str:
        """Everything, for the message of a failure."""
        with self._lock:
            past = [*self._past.values(), *(pod.status() for pod in self._pods.values())]
            lines = [f"{name}: {status}" for name, status in self._jobs.items()]
        for status in past:
            lines += [f"--- {status}", *self.log(status.name).splitlines()[-15:]]
        return "\n".join(lines)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until ``condition()``; fail with ``what`` and all that there is to see."""
        deadline = Deadline.after(limit_s)
        while not condition():
            self._check()
            assert not deadline.expired, f"{what}:\n{self.describe()}"
            pause(TICK_S)

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    # ---- the node

    def _main(self) -> None:
        try:
            with self._segment:
                self._up.set()
                try:
                    while not self._stop.is_set():
                        with self._lock:
                            self._tick(SYSTEM.monotonic())
                        pause(TICK_S, self._stop)
                finally:
                    self._end()
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self._trouble = error
        finally:
            self._up.set()

    def _tick(self, now: float) -> None:
        for pod in self._pods.values():
            pod.tick(now)
        for job in self._all(Job):
            self._tick_job(job, now)
        for thing in (*self._all(Deployment), *self._all(StatefulSet)):
            present = {pod.index for pod in self._of(owner(thing))}
            for number in set(range(thing.spec.replicas)) - present:
                self._create(thing, number)
        self._forget()
        found = [
            (pod.address, service.names(pod.identity.hostname, pod.container))
            for service in self._all(Service)
            for pod in self._pods.values()
            if pod.process is not None and service.spec.selector.items() <= pod.identity.labels.items()
        ]
        for pod in self._pods.values():
            pod.resolve(found)

    def _tick_job(self, job: Job, now: float) -> None:
        name = job.metadata.name
        views = [
            PodView(each.name, each.index, each.phase, each.exit_code, each.conditions, each.deleting)
            for each in self._of(owner(job))
        ]
        decision = job_rules.decide(job.spec, self._tallies.get(name, Tally()), views, now, self._delay_s)
        self._tallies[name] = tally = decision.tally
        self._jobs[name] = JobStatus(
            tally.verdict, tally.reason, tally.completed, dict(tally.failures), tally.failed(job.spec)
        )
        for index in decision.create:
            self._create(job, index)
        for pod in decision.delete:
            self._pods[pod].delete()

    def _create(self, thing: Controller, number: int) -> None:
        who = identity(thing, number, "".join(random.choices(_LETTERS, k=5)))
        # A pod of a StatefulSet has the name of the one before it, and a network of its own.
        life = f"{who.name}.{next(self._lives)}"
        host = self._segment.attach(life)
        configs = {found.metadata.name: found for found in self._all(ConfigMap)}
        directory = self.directory / "pods" / life
        cut = partial(self._segment.cut, life)
        around = Surroundings(host.inside, cut, host.address, directory, self._claims(), configs)
        self._pods[who.name] = Pod(who, thing.spec.template.spec, around)
        self._logs[who.name] = self._pods[who.name].log

    def _forget(self) -> None:
        """Pods that have ended and were to be deleted are gone, and their network with them."""
        for name, pod in list(self._pods.items()):
            if pod.deleting and pod.phase in ENDED:
                self._past[name] = pod.status()
                del self._pods[name]

    def _end(self) -> None:
        for pod in self._pods.values():
            if pod.process is not None:
                pod.process.end()

    # ---- what pods refer to

    def _all(self, kind: type[Any]) -> list[Any]:
        return [found for found in self._objects.values() if isinstance(found, kind)]

    def _of(self, owner: str) -> list[PodStatus]:
        return [status for pod in self._pods.values() if (status := pod.status()).owner == owner]

    def _claims(self) -> dict[str, Path]:
        """All claims, those of StatefulSets too."""
        names = [claim.metadata.name for claim in self._all(Claim)]
        for thing in self._all(StatefulSet):
            names += [
                f"{claim.metadata.name}-{thing.metadata.name}-{number}"
                for claim in thing.spec.volume_claim_templates
                for number in range(thing.spec.replicas)
            ]
        return {name: self.claim(name) for name in names}
