"""One pod from start to end: started, probed, restarted, asked to leave, killed after its grace period.

*Runs in* the node's thread; statuses are values that any thread may read.
*Owns* the pod's directory, network and container.
*Fails by* ConfigError where a cluster would leave the pod waiting for ever.
*Invariant*: SIGTERM goes to process 1 once, SIGKILL to everything when the grace period is over.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_trainer.errors import ConfigError
from tests.support.kubelet.images import image
from tests.support.kubelet.job_rules import ENDED, Phase
from tests.support.kubelet.objects import ConfigMap, Container, PodSpec
from tests.support.kubelet.probing import Prober
from tests.support.kubelet.process import Process, Sandbox
from tests.support.kubelet.volumes import Volumes
from tests.support.manifests import container

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 10.0, 300.0
DISRUPTED = "DisruptionTarget"
"""The condition of a pod that has to make room."""


def backoff_s(restarts: int) -> float:
    """How long a container that ended waits before its next start: the first one follows at once."""
    return min(FIRST_BACKOFF_S * 2 ** (restarts - 1), LONGEST_BACKOFF_S) if restarts else 0.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a pod is, and whose. ``index`` is its completion index; ``claims`` its own, by name of the volume."""

    name: str
    owner: str
    hostname: str
    index: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    claims: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leaving:
    """How a container ended after SIGTERM. ``killed``: only by SIGKILL."""

    took_s: float
    killed: bool


@dataclass(frozen=True, slots=True)
class PodStatus:
    """What ``kubectl get pod`` would say."""

    name: str
    owner: str
    index: int
    phase: Phase
    ready: bool
    address: str
    exit_code: int | None = None
    restarts: int = 0
    conditions: frozenset[str] = frozenset()
    deleting: bool = False
    leaving: Leaving | None = None
    trouble: str = ""
    """The last bad answer to a probe."""

    @property
    def living(self) -> bool:
        """Whether it has not ended."""
        return self.phase not in ENDED


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the node gives a pod: its network, the files of its own, and what its specification refers to."""

    enter: Sequence[str]
    """The words that start a command in its network."""
    cut: Callable[[], None]
    """Takes the network away."""
    address: str
    directory: Path
    claims: Mapping[str, Path]
    configs: Mapping[str, ConfigMap]


class Pod:
    """See the module."""

    def __init__(self, identity: Identity, spec: PodSpec, around: Surroundings) -> None:
        self.identity, self.spec, self._around = identity, spec, around
        self.phase = Phase.PENDING
        self.exit_code: int | None = None
        self.conditions: frozenset[str] = frozenset()
        self.deleting = False
        self.leaving: Leaving | None = None
        self._restarts = 0
        self._process: Process | None = None
        self._prober: Prober | None = None
        self._start_at = 0.0
        self._asked_at: float | None = None
        self._killed = False
        around.directory.mkdir(parents=True)
        self.log = around.directory / "log"
        self.log.touch()
        self._hosts = around.directory / "hosts"
        self.resolve([])

    @property
    def address(self) -> str:
        return self._around.address

    @property
    def container(self) -> Container:
        return self.spec.container

    @property
    def ready(self) -> bool:
        """Whether it serves: a pod that is being ended does not."""
        serving = self._process is not None and not self.deleting
        return serving and self._prober is not None and self._prober.health.ready

    @property
    def process(self) -> Process | None:
        """The container that runs."""
        return self._process

    def resolve(self, records: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Write these names to its hosts file, which stays the same one, since it is mounted. Its own name comes
        first, since a resolver takes the first line that fits."""
        known = [("127.0.0.1", ["localhost"]), (self.address, [self.identity.hostname]), *records]
        text = "".join(f"{address} {' '.join(names)}\n" for address, names in known).encode()
        with self._hosts.open("r+b" if self._hosts.exists() else "w+b", buffering=0) as file:
            if file.read() != text:
                file.seek(0)
                file.write(text)
                file.truncate()

    def status(self) -> PodStatus:
        """How it is now."""
        return PodStatus(
            name=self.identity.name,
            owner=self.identity.owner,
            index=self.identity.index,
            phase=self.phase,
            ready=self.ready,
            address=self.address,
            exit_code=self.exit_code,
            restarts=self._restarts,
            conditions=self.conditions,
            deleting=self.deleting,
            leaving=self.leaving,
            trouble=self._prober.last_bad if self._prober is not None else "",
        )

    # ---- its life

    def delete(self) -> None:
        """Ask for its end."""
        self.deleting = True

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self.phase in ENDED:
            return
        if self._process is None:
            self._without_container(now)
        elif (code := self._process.exit_code) is not None:
            self._ended(code, now)
        elif self._prober is not None and self._process.pid is not None:
            health = self._prober.tick(now)
            if self.deleting or health.unfit:
                self._press(now)

    def _without_container(self, now: float) -> None:
        if self.deleting:
            # One that was never started, or waits to be started again: there is no process to signal.
            self.exit_code = 128 + signal.SIGKILL if self.exit_code is None else self.exit_code
            self._over(Phase.FAILED)
        elif now >= self._start_at:
            self._start()

    def _start(self) -> None:
        around, manifest = self._around, self.container.model_dump(by_alias=True, exclude_none=True)
        settings = {name: config.data for name, config in around.configs.items()}
        started = container({"spec": {"containers": [manifest]}}, settings, pod=self.identity.name, ip=self.address)
        if started.unresolved:
            raise ConfigError(f"pod {self.identity.name}: variables {started.unresolved} have no value")
        volumes = Volumes(around.directory / "volumes", around.claims, self.identity.claims, around.configs)
        sandbox = Sandbox(around.enter, self.identity.hostname, self._hosts, around.directory, self.log)
        found, mounts = image(self.container.image), volumes.mounts(self.spec)
        self._process = Process(self.spec, found, sandbox, started.command, started.environment, mounts)
        self._prober = Prober(self.container, self.address, self._process.inside)
        self._asked_at, self._killed = None, False
        self.phase = Phase.RUNNING

    def _press(self, now: float) -> None:
        """Ask it to end, and end it when it had its time."""
        if self._process is None:
            return
        if self._asked_at is None:
            if self._process.send(signal.SIGTERM):
                self._asked_at = now
        elif not self._killed and now >= self._asked_at + self.spec.termination_grace_period_seconds:
            self._killed = self._process.send(signal.SIGKILL)

    def _ended(self, code: int, now: float) -> None:
        self.exit_code = code
        if self._asked_at is not None:
            self.leaving = Leaving(now - self._asked_at, self._killed)
        self._process = None
        if self.spec.restart_policy == "Always" and not self.deleting:
            self._start_at = now + backoff_s(self._restarts)
            self._restarts += 1
            return
        self._over(Phase.SUCCEEDED if code == 0 else Phase.FAILED)

    def _over(self, phase: Phase) -> None:
        self.phase = phase
        self._around.cut()
