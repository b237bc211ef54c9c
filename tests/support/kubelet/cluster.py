"""A cluster of one node in this process: objects are applied, pods run, controllers act, and tests look and interfere.

*Runs in* a thread named ``node``, which lives in a network of its own; tests call from theirs.
*Owns* that thread, the network, all pods and their directories below the one that it is given.
*Fails by* raising to whoever waits what goes wrong in the thread.
*Invariant*: after exit no process of a pod is left.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.local import processes
from elastic_trainer.local.etcd import find_binary
from elastic_trainer.local.hosts import Segment
from tests.support.kubelet.pods import DISRUPTED, ENDED, JobState, Pod, Process
from tests.support.manifests import Manifest
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


def owner(thing: Manifest) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


class Cluster:
    """See the module. ``replacement_delay_s``: how long a failed pod's replacement waits; clusters have 10."""

    def __init__(self, directory: Path, *, replacement_delay_s: float = 10.0) -> None:
        self.directory = directory
        self._delay_s = replacement_delay_s
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._pods: dict[str, Pod] = {}
        self._past: dict[str, Pod] = {}
        self._lives = itertools.count(1)
        self._jobs: defaultdict[str, JobState] = defaultdict(JobState)
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

    def apply(self, documents: Sequence[Manifest]) -> None:
        """Create these objects; those of kinds that change nothing for processes have no effect."""
        with self._lock:
            self._objects |= {(each["kind"], each["metadata"]["name"]): each for each in documents}

    def scale(self, name: str, size: int) -> None:
        """Change the size of a Job, as ``kubectl patch`` does it."""
        with self._lock:
            self._objects["Job", name]["spec"] |= {"parallelism": size, "completions": size}

    def evict(self, name: str) -> None:
        """Ask for its end as a drain does: no fault of the pod's."""
        with self._lock:
            self._pods[name].conditions |= {DISRUPTED}
            self._pods[name].deleting = True

    def send(self, name: str, number: signal.Signals) -> None:
        """Signal process 1 of a pod, as something on its machine could."""
        with self._lock:
            if not self._process(name).send(number):
                raise ConfigError(f"pod {name} has no process")

    def processes(self, name: str) -> list[psutil.Process]:
        with self._lock:
            process = self._pods[name].process
        return processes.tree(process.pid) if process is not None and process.pid is not None else []

    def execute(self, name: str, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        with self._lock:
            inside, environment = self._process(name).inside(words)
        return subprocess.run(
            inside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )

    def _process(self, name: str) -> Process:
        process = self._pods[name].process
        if process is None:
            raise ConfigError(f"pod {name} has no process")
        return process

    # ---- what there is to see

    def pods(self, owner: str) -> list[Pod]:
        """The pods that there are of one controller (``Job/mnist``)."""
        with self._lock:
            return [pod for pod in self._pods.values() if pod.owner == owner]

    def living(self, owner: str) -> list[Pod]:
        return sorted((pod for pod in self.pods(owner) if pod.living), key=lambda pod: pod.index)

    def pod(self, name: str) -> Pod:
        with self._lock:
            return self._pods[name] if name in self._pods else self._past[name]

    def all_pods(self, owner: str) -> list[Pod]:
        with self._lock:
            return [pod for pod in (*self._past.values(), *self._pods.values()) if pod.owner == owner]

    def job(self, name: str) -> JobState:
        with self._lock:
            return self._jobs[name]

    def log(self, name: str) -> str:
        return self.pod(name).log.read_text(encoding="utf-8", errors="replace")

    def claim(self, name: str) -> Path:
        return self.directory / "claims" / name

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until ``condition()``; fail with ``what`` and all that there is to see."""
        deadline = Deadline.after(limit_s)
        while not condition():
            self._check()
            assert not deadline.expired, f"{what}:\n{self._described()}"
            pause(TICK_S)

    def _described(self) -> str:
        with self._lock:
            lines = [f"{name}: {state}" for name, state in self._jobs.items()]
            for pod in (*self._past.values(), *self._pods.values()):
                trouble = pod.prober.trouble if pod.prober is not None else ""
                lines += [f"--- {pod} {trouble}", *self.log(pod.name).splitlines()[-15:]]
        return "\n".join(lines)

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
                    for pod in self._pods.values():
                        if pod.process is not None:
                            pod.process.end()
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self._trouble = error
        finally:
            self._up.set()

    def _tick(self, now: float) -> None:
        for pod in self._pods.values():
            pod.tick(now)
        for job in self._all("Job"):
            state = self._jobs[job["metadata"]["name"]]
            create, delete = state.look(job["spec"], self.pods(owner(job)), now, self._delay_s)
            for index in create:
                self._create(job, index)
            for name in delete:
                self._pods[name].deleting = True
        for thing in (*self._all("Deployment"), *self._all("StatefulSet")):
            present = {pod.index for pod in self.pods(owner(thing))}
            for number in set(range(thing["spec"]["replicas"])) - present:
                self._create(thing, number)
        for name, pod in list(self._pods.items()):
            if pod.deleting and pod.phase in ENDED:
                self._past[name] = self._pods.pop(name)
        found = [
            (pod.address, _names(service, pod.hostname))
            for service in self._all("Service")
            for pod in self._pods.values()
            if pod.process is not None and service["spec"]["selector"].items() <= pod.labels.items()
        ]
        for pod in self._pods.values():
            pod.resolve(found)

    def _create(self, thing: Manifest, number: int) -> None:
        name, template = thing["metadata"]["name"], thing["spec"]["template"]
        numbered, suffixed = f"{name}-{number}", "".join(random.choices(_LETTERS, k=5))
        claims = {
            each["metadata"]["name"]: f"{each['metadata']['name']}-{numbered}"
            for each in thing["spec"].get("volumeClaimTemplates", ())
        }
        called = {"Job": f"{numbered}-{suffixed}", "Deployment": f"{name}-{suffixed}"}.get(thing["kind"], numbered)
        hostname = called if thing["kind"] == "Deployment" else numbered
        # A pod of a StatefulSet has the name of the one before it, and a network of its own.
        life = f"{called}.{next(self._lives)}"
        host = self._segment.attach(life)
        known = [each["metadata"]["name"] for each in self._all("PersistentVolumeClaim")]
        self._pods[called] = Pod(
            called,
            owner(thing),
            hostname,
            number,
            template["spec"],
            template["metadata"]["labels"],
            claims,
            host.command,
            partial(self._segment.cut, life),
            host.address,
            self.directory / "pods" / life,
            {claim: self.claim(claim) for claim in (*known, *claims.values())},
            {each["metadata"]["name"]: each["data"] for each in self._all("ConfigMap")},
        )

    def _all(self, kind: str) -> list[Manifest]:
        return [found for (known, _), found in self._objects.items() if known == kind]


def _names(service: Manifest, hostname: str) -> list[str]:
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    own = [name, *([f"{hostname}.{name}"] if service["spec"].get("clusterIP") == "None" else [])]
    return [each + suffix for each in own for suffix in ("", f".{namespace}", f".{namespace}.svc")]
