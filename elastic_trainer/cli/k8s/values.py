"""What one run on Kubernetes is made of, checked: the values that the templates beside this module show. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from elastic_trainer.cli.run import MAX_RESTARTS
from elastic_trainer.model import PreflightMode, RecoveryMode
from elastic_trainer.settings import Frozen, RendezvousOptions, parse_endpoints, validated

CHECKPOINTS = "/checkpoints"
CERTIFICATES = "/etc/elastic-trainer-tls"
PASSWORD = "/etc/elastic-trainer-etcd/password"
METRICS_PORT = 9471
ALIVE = "/tmp/alive"
CONNECT_S = 120.0
"""How long a pod waits for etcd, which may have to be scheduled again first."""
GRACE_S = 30
"""From the end of --shutdown-timeout to SIGKILL."""
AGENT_LEAVES_S = 10
"""From the end of the workers to that of --shutdown-timeout."""
LEAST_SHUTDOWN_S = 60
"""Agreeing to stop, leaving the round and writing a small checkpoint."""
IMPORT_S = 30.0
"""What Python and torch need on a busy machine before the first line of the agent."""
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", 1)
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGT]|[KMGT]i)?")
_OURS = ("node_id", "interface", "metrics_address", "metrics_port", "alive_file")
_OUR_VARIABLES = ("POD_NAME", "POD_IP", "NPROC_PER_NODE")


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


_LABEL = r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?"
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
Label = Annotated[str, _matching(_LABEL, "at most 52 lower-case letters, digits and '-', a letter first")]
ObjectName = Annotated[str, _matching(_NAME, "only lower-case letters, digits, '-' and '.'")]
LabelKey = Annotated[str, _matching(_KEY, "not the key of a label, such as topology.kubernetes.io/zone")]
ImageName = Annotated[str, _matching(r"[a-zA-Z0-9][-a-zA-Z0-9._/:@]*", "not an image, such as example.com/name:1")]
Seconds = Annotated[int, Field(ge=0, le=10**7)]


def quantity(text: str) -> float:
    """The value of a Kubernetes quantity such as 500m, 4 or 16Gi."""
    found = _QUANTITY.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ValueError("not a quantity such as 4, 500m or 16Gi")
    return float(found[1]) * _UNITS[found[2] or ""]


class MountedFile(Frozen):
    """A file that goes into the ConfigMap of the run: the user's script or job file."""

    name: str
    key: str
    text: str


class KubernetesRun(Frozen):
    """See the module. ``words`` is what torchrun runs in the pod, with its arguments."""

    name: Label
    image: ImageName
    words: tuple[str, ...] = Field(min_length=1)
    source: MountedFile | None = None
    namespace: Label | None = None
    least: int = Field(ge=1)
    most: int = Field(le=10_000)
    pods: int
    gpus: int = Field(default=0, ge=0, le=64)
    workers: int = Field(default=1, ge=1, le=256)
    cpu: tuple[str, str]
    memory: tuple[str, str]
    shm: str
    recovery: RecoveryMode = RecoveryMode.IN_PLACE
    conf: Mapping[str, str] = Field(default_factory=dict)
    max_restarts: int = Field(default=MAX_RESTARTS, ge=0)
    retries: int = Field(default=10, ge=1)
    shutdown_s: int = Field(default=LEAST_SHUTDOWN_S, ge=LEAST_SHUTDOWN_S, le=10**6)
    startup_s: int = Field(default=0, ge=0, le=10**6, description="0: what the checks before joining may take")
    ttl_s: Seconds | None = None
    priority_class: ObjectName | None = None
    spread: tuple[LabelKey, ...] = Field(default=("kubernetes.io/hostname",), min_length=1)
    queue: ObjectName | None = None
    endpoint: str | None = None
    tls_secret: ObjectName | None = None
    user_secret: ObjectName | None = None
    network_policy: bool = False
    checkpoint_claim: ObjectName | None = "checkpoints"
    checkpoint_size: str | None = "100Gi"
    storage_class: ObjectName | None = None
    access_mode: str = Field(default="ReadWriteMany", pattern="^ReadWrite(Many|Once)$")
    data_claim: ObjectName | None = None
    service_account: ObjectName = "elastic-trainer"
    environment: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("cpu", "memory")
    @classmethod
    def _spans(cls, value: tuple[str, str]) -> tuple[str, str]:
        if quantity(value[0]) > quantity(value[1]):
            raise ValueError("the request is larger than the limit")
        return value

    @field_validator("shm", "checkpoint_size")
    @classmethod
    def _quantities(cls, value: str | None) -> str | None:
        if value is not None:
            quantity(value)
        return value

    @field_validator("environment")
    @classmethod
    def _variables(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        wrong = [name for name in value if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a name of a variable")
        ours = [name for name in _OUR_VARIABLES if name in value]
        if ours:
            raise ValueError(f"{ours[0]!r} cannot be given: it is the pod's own")
        return value

    @field_validator("conf")
    @classmethod
    def _conf(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        ours = [name for name in _OURS if name in value]
        if ours:
            raise ValueError(f"{ours[0]} cannot be given: it is the pod's own")
        _options(value)
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        if not self.least <= self.pods <= self.most:
            raise ValueError(f"{self.pods} pods are not within --nodes {self.least}:{self.most}")
        if self.gpus and self.workers != self.gpus:
            raise ValueError(f"{self.workers} workers for {self.gpus} GPUs; give one worker to each")
        if 2 * quantity(self.shm) > quantity(self.memory[1]):
            raise ValueError(
                f"--shm {self.shm} is more than half of the memory, {self.memory[1]}, of which it is a part"
            )
        if self.startup_s and self.startup_s < self.least_startup_s:
            raise ValueError(
                f"--startup-timeout {self.startup_s} is below what a start takes, {self.least_startup_s:g}"
            )
        if self.endpoint is not None:
            parse_endpoints(self.endpoint)
        return self

    @property
    def options(self) -> dict[str, str]:
        """``--rdzv-conf``: the pod's own, then the user's."""
        ours = ("$(POD_NAME)", "$(POD_IP)", "0.0.0.0", str(METRICS_PORT), ALIVE)
        return {
            "recovery": str(self.recovery),
            **dict(zip(_OURS, ours, strict=True)),
            "connect_timeout": f"{CONNECT_S:g}",
            **self.conf,
        }

    @property
    def rendezvous(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.options.items())

    @property
    def least_startup_s(self) -> float:
        """Import, two waits for etcd, and the checks of the machine where they are asked for."""
        options = _options({"connect_timeout": f"{CONNECT_S:g}", **self.conf})
        checks = options.preflight_timeout + options.preflight_wait + options.connect_timeout
        return IMPORT_S + 2 * options.connect_timeout + (checks if options.preflight is not PreflightMode.OFF else 0.0)

    @property
    def startup_limit_s(self) -> int:
        """A whole number of minutes, unless one was given."""
        return self.startup_s or 60 * math.ceil(self.least_startup_s / 60)

    @property
    def grace_s(self) -> int:
        return self.shutdown_s + GRACE_S

    @property
    def leave_within_s(self) -> int:
        """Of ``shutdown_s`` the workers' part; in the rest the agent leaves the round."""
        return self.shutdown_s - AGENT_LEAVES_S

    @property
    def may_fail(self) -> int:
        """``maxFailedIndexes``. With a queue that may start fewer pods it must not be more than the fewest pods."""
        return min(may_fail(self.pods, self.least), self.least if self.queue is not None else self.pods)

    @property
    def threads(self) -> int:
        """Of torch, for each worker."""
        return max(1, int(quantity(self.cpu[1])) // self.workers)

    @property
    def budget(self) -> bool:
        """Whether there is a disruption budget: with no pod more than the minimum no machine could be drained."""
        return self.pods > self.least

    @property
    def variables(self) -> dict[str, str]:
        """Where etcd is, if the ConfigMap of the platform does not say it, and the user's own."""
        known: dict[str, str] = {}
        if self.endpoint is not None:
            known["ELASTIC_TRAINER_ENDPOINT"] = self.endpoint
            if self.tls_secret is not None:
                files = {"CA_CERT": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
                known |= {f"ELASTIC_TRAINER_{name}": f"{CERTIFICATES}/{file}" for name, file in files.items()}
            if self.user_secret is not None:
                known["ELASTIC_TRAINER_PASSWORD_FILE"] = PASSWORD
        return known | dict(self.environment)


def _options(conf: Mapping[str, str]) -> RendezvousOptions:
    """``--rdzv-conf`` checked, but for the files that it names: those are in the pod."""
    return validated(RendezvousOptions, conf, "--rdzv-conf")


def may_fail(pods: int, least: int) -> int:
    """``maxFailedIndexes``: how many indexes may be given up until the run has fewer pods than it can train with."""
    return max(0, pods - least)
