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
from elastic_trainer.local.namespaces import PROGRAMS, Segment
from tests.support.kubelet import job_rules, sets
from tests.support.kubelet.environment import Facts, service_links
from tests.support.kubelet.job_rules import ENDED, OVER, Condition, PodView, Tally
from tests.support.kubelet.names import Known, records
from tests.support.kubelet.objects import (
    Budget,
    Claim,
    ConfigMap,
    Deployment,
    Job,
    Secret,
    Service,
    StatefulSet,
    parsed,
)
from tests.support.kubelet.pods import DISRUPTED, Identity, Pod, PodStatus, Surroundings
from tests.support.requirements import missing, needs, needs_root

TICK_S = 0.05
STOP_LIMIT_S = 20.0
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def check_possible() -> None:
    """End the test, as ``requirements`` has it, where pods cannot be played."""
    needs_root("namespaces for pods")
    for program in (*PROGRAMS, "setpriv"):
        needs(program, "namespaces for pods")
    try:
        find_binary()
    except ConfigError as error:
        missing(str(error))


class EvictionRefusedError(Exception):
    """A disruption budget forbids it now."""


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


def merged(document: Any, patch: Any) -> Any:
    """``document`` with a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(document) if isinstance(document, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class Cluster:
    """See the module. ``replacement_delay_s``: see job_rules.decide; clusters have 10."""

    def __init__(self, directory: Path, *, replacement_delay_s: float = 10.0) -> None:
        self.directory = directory
        self._delay_s = replacement_delay_s
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}
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
        """Create or replace these objects."""
        for document in documents:
            found = parsed(document)
            if found is not None:
                self._put((str(document["kind"]), str(document["metadata"]["name"])), dict(document), found)

    def patch(self, kind: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change an object by a merge patch, as ``kubectl patch --type=merge`` does."""
        document = merged(self._documents[kind, name], patch)
        found = parsed(document)
        if found is not None:
            self._put((kind, name), document, found)

    def _put(self, key: tuple[str, str], document: dict[str, Any], found: Any) -> None:
        with self._lock:
            before = self._objects.get(key)
            if isinstance(before, Job) and before.spec.template != found.spec.template:
                raise ConfigError(f"Job {key[1]}: the template of a Job cannot be changed")
            self._documents[key], self._objects[key] = document, found

    def evict(self, name: str) -> None:
        """Ask for it as a drain does: within disruption budgets, and no fault of the pod's."""
        with self._lock:
            pod = self._pods[name]
            for budget in self._all(Budget):
                ready = [each for each in self._pods.values() if each.ready and self._selects(budget, each)]
                if self._selects(budget, pod) and pod.ready and len(ready) <= budget.spec.min_available:
                    raise EvictionRefusedError(f"{budget.metadata.name} needs {budget.spec.min_available} ready pods")
            pod.conditions |= {DISRUPTED}
            pod.delete()

    @staticmethod
    def _selects(budget: Budget, pod: Pod) -> bool:
        return budget.spec.selector.matches(pod.identity.labels)

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
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            self._trouble = error
        finally:
            self._up.set()

    def _tick(self, now: float) -> None:
        for pod in self._pods.values():
            pod.tick(now)
        for job in self._all(Job):
            self._tick_job(job, now)
        for thing in (*self._all(Deployment), *self._all(StatefulSet)):
            missing, surplus = sets.wanted(thing, self._of(sets.owner(thing)))
            for number in missing:
                self._create(thing, number)
            for name in surplus:
                self._pods[name].delete()
        self._forget()
        found = records(Known(service, self._selected(service)) for service in self._all(Service))
        for pod in self._pods.values():
            pod.resolve(found)

    def _tick_job(self, job: Job, now: float) -> None:
        name = job.metadata.name
        container = job.spec.template.spec.container.name
        views = [
            PodView(each.name, each.index, each.phase, each.exit_code, each.conditions, each.deleting, container)
            for each in self._of(sets.owner(job))
        ]
        decision = job_rules.decide(job.spec, self._tallies.get(name, Tally()), views, now, self._delay_s)
        self._tallies[name] = tally = decision.tally
        self._jobs[name] = JobStatus(
            tally.verdict or decision.condition, decision.reason, tally.completed, dict(tally.failures), tally.failed
        )
        for index in decision.create:
            self._create(job, index)
        for pod in decision.delete:
            self._pods[pod].delete()

    def _create(self, thing: Job | Deployment | StatefulSet, number: int) -> None:
        who = sets.identity(thing, number, "".join(random.choices(_LETTERS, k=5)))
        template = thing.spec.template
        spec = template.spec.model_copy(update={"subdomain": sets.subdomain(thing, template)})
        # A pod of a StatefulSet has the name of the one before it, and a network of its own.
        life = f"{who.name}.{next(self._lives)}"
        enter, address = self._segment.attach(life)
        cut = partial(self._segment.cut, life)
        directory = self.directory / "pods" / life
        around = Surroundings(enter, cut, address, directory, self._claims(), self._facts)
        self._pods[who.name] = Pod(who, spec, around)
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

    def _selected(self, service: Service) -> list[Pod]:
        chosen = service.spec.selector.items()
        return [pod for pod in self._pods.values() if pod.process is not None and chosen <= pod.identity.labels.items()]

    def _facts(self, who: Identity, address: str) -> Facts:
        links = [(service, pods[0].address) for service in self._all(Service) if (pods := self._selected(service))]
        return Facts(
            who.name,
            who.namespace,
            address,
            who.labels,
            who.annotations,
            {found.metadata.name: found for found in self._all(ConfigMap)},
            {found.metadata.name: found for found in self._all(Secret)},
            service_links(links),
        )

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
