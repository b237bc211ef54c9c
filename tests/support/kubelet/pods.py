"""A pod on the stand-in: its image, container, probes and volumes, and what a Job makes of how its pods end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import elastic_trainer
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.etcd import find_binary
from tests.support import manifests
from tests.support.kubelet import container
from tests.support.manifests import Manifest

UID = 10001
"""The user that the Dockerfile makes."""
HOME = "/home/trainer"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_SETTINGS = ("/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache")


@dataclass(frozen=True, slots=True)
class Image:
    """``trees``: what is seen where (source by target), read-only. ``unreadable``: a path that the image's user could
    not read on this machine, if there is one."""

    environment: Mapping[str, str]
    directory: str
    trees: Mapping[str, str]
    links: Mapping[str, str]
    unreadable: str


@cache
def image(reference: str) -> Image:
    """What stands for the image ``reference``: for ours this virtual environment, and this checkout's package in it."""
    name = reference.rpartition("/")[2].partition("@")[0].partition(":")[0]
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    if name == "etcd":
        binary = Path(find_binary())
        trees = _outermost(links, []) | {"/usr/local/bin": str(binary.parent)}  # where the image has it
        return Image({"PATH": "/usr/local/bin:/usr/bin:/bin"}, "/", trees, links, _unreadable([binary.parent, binary]))
    if name != "elastic-trainer":
        raise ConfigError(f"nothing on this machine stands for the image {reference!r}")
    checkout = Path(elastic_trainer.__file__).parents[1]
    places = [Path(sys.prefix), Path(sys.base_prefix), checkout]
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(checkout),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": HOME,
    }
    packages = [Path(path) for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")]
    needed = [*places, Path(sys.executable).resolve(), checkout / "elastic_trainer" / "__init__.py", *packages]
    return Image(environment, HOME, _outermost(links, places), links, _unreadable(needed))


def _outermost(links: Iterable[str], more: Iterable[Path]) -> dict[str, str]:
    """The system's directories and ``more``; where one lies in another, the outer one will do."""
    wanted = (*_SYSTEM, *_SETTINGS, "/sys", *map(str, more))
    found = [path for path in wanted if path not in links and os.path.exists(path)]
    return {
        path: path for path in found if not any(path != other and Path(path).is_relative_to(other) for other in found)
    }


def _unreadable(paths: Iterable[Path]) -> str:
    """The first of ``paths`` that not everybody may read; what lies above them does not matter."""
    for path in paths:
        mode = path.stat().st_mode
        if not mode & stat.S_IROTH or (path.is_dir() and not mode & stat.S_IXOTH):
            return str(path)
    return ""


class Condition(StrEnum):
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass
class JobState:
    """What a Job remembers. ``condition`` comes when the last pod has gone after the ``verdict``."""

    condition: Condition | None = None
    verdict: Condition | None = None
    reason: str = ""
    succeeded: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    """Failures that count, by index."""
    failed: set[int] = field(default_factory=set)
    """Indexes that have failed for good."""
    counted: set[str] = field(default_factory=set)
    ended_at: dict[int, float] = field(default_factory=dict)

    def look(
        self, spec: dict[str, Any], pods: Sequence[Pod], now: float, delay_s: float
    ) -> tuple[list[int], list[str]]:
        """The indexes that need a pod now, ``delay_s`` after the last one's failure, and the pods that are to go."""
        if self.condition is not None:
            return [], []
        for pod in pods:
            if pod.phase in ENDED and pod.name not in self.counted:
                self.counted.add(pod.name)
                if pod.index < spec["completions"]:  # else it was scaled down: neither a failure nor a success
                    self._count(spec, pod, now)
        self.failed = {index for index, count in self.failures.items() if count > spec["backoffLimitPerIndex"]}
        if len(self.succeeded) >= spec["successPolicy"]["rules"][0]["succeededCount"]:
            self._decide(Condition.COMPLETE, "SuccessPolicy")
        if len(self.failed) > spec["maxFailedIndexes"]:
            self._decide(Condition.FAILED, "MaxFailedIndexesExceeded")
        living = [pod for pod in pods if pod.living]
        unwanted = [pod.name for pod in living if self.verdict or pod.index >= spec["completions"]]
        if self.verdict is not None:
            self.condition = None if living else self.verdict
            return [], unwanted
        taken = {pod.index for pod in living} | self.succeeded | self.failed
        free = [index for index in range(spec["completions"]) if index not in taken]
        return [index for index in free if now >= self.ended_at.get(index, -delay_s) + delay_s], unwanted

    def _decide(self, verdict: Condition, reason: str) -> None:
        if self.verdict is None:
            self.verdict, self.reason = verdict, reason

    def _count(self, spec: dict[str, Any], pod: Pod, now: float) -> None:
        if pod.phase is Phase.SUCCEEDED:
            self.succeeded.add(pod.index)
            return
        self.ended_at[pod.index] = now
        actions = (rule["action"] for rule in spec["podFailurePolicy"]["rules"] if _matches(rule, pod))
        action = next(actions, "Count")
        if action == "Count":
            self.failures[pod.index] = self.failures.get(pod.index, 0) + 1
        elif action == "FailJob":
            self._decide(Condition.FAILED, f"PodFailurePolicy: pod {pod.name} exit code {pod.exit_code}")


def _matches(rule: dict[str, Any], pod: Pod) -> bool:
    if "onExitCodes" in rule:
        return pod.exit_code in rule["onExitCodes"]["values"]
    return any(each["type"] in pod.conditions for each in rule["onPodConditions"])


BACKOFF_S = 10.0
"""How long a container that ended again waits for its next start; the first one follows at once."""
DISRUPTED = "DisruptionTarget"
"""The condition of a pod that has to make room."""


class Phase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class Prober:
    """Asks the probes of one life of a container, each when it is due, in a thread of the question's own."""

    def __init__(self, container: Manifest, process: Process, address: str) -> None:
        self._container, self._process, self._address = container, process, address
        self._due: dict[str, float] = {}
        self._answers: dict[str, str | None] = {}
        """What is wrong, by probe; None while it is asked."""
        self._bad: dict[str, int] = {}
        self.started = self.ready = self.unfit = False
        self.trouble = ""

    def tick(self, now: float) -> None:
        """Take the answers that have come, and ask what is due."""
        for kind in ("readiness", "liveness") if self.started else ("startup",):
            probe = self._container[f"{kind}Probe"]
            if self._answers.get(kind) is not None:
                self._judge(kind, str(self._answers.pop(kind)), probe["failureThreshold"])
            if kind not in self._answers and now >= self._due.get(kind, 0.0):
                self._due[kind], self._answers[kind] = now + probe["periodSeconds"], None
                threading.Thread(target=self._ask, args=(kind, probe), daemon=True).start()

    def _judge(self, kind: str, why: str, limit: int) -> None:
        self._bad[kind] = self._bad.get(kind, 0) + 1 if why else 0
        if not why:
            self.started, self.ready = True, self.ready or kind == "readiness"
            return
        self.trouble = f"{kind}: {why}"
        if self._bad[kind] >= limit:
            self.ready = self.ready and kind != "readiness"
            self.unfit = self.unfit or kind != "readiness"

    def _ask(self, kind: str, probe: Manifest) -> None:
        try:
            self._answers[kind] = self._complaint(probe)
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            self._answers[kind] = f"{type(error).__name__}: {error}"

    def _complaint(self, probe: Manifest) -> str:
        limit_s = probe["timeoutSeconds"]
        if "exec" in probe:
            words, environment = self._process.inside(probe["exec"]["command"])
            ran = subprocess.run(words, env=environment, capture_output=True, timeout=limit_s, check=False)
            return "" if ran.returncode == 0 else f"exit code {ran.returncode}"
        port = {each["name"]: each["containerPort"] for each in self._container["ports"]}[probe["httpGet"]["port"]]
        with contextlib.closing(http.client.HTTPConnection(self._address, port, timeout=limit_s)) as connection:
            connection.request("GET", probe["httpGet"]["path"], headers={"User-Agent": "kube-probe/1.32"})
            status = connection.getresponse().status
            return "" if 200 <= status < 400 else f"status {status}"


class Process:
    """A running container: process 1 and what it started, which dies with the node's thread (see container.py)."""

    def __init__(self, pod: Pod) -> None:
        (manifest,), who = pod.spec["containers"], pod.spec["securityContext"]
        found = image(manifest["image"])
        started = manifests.container({"spec": pod.spec}, pod.configs, pod=pod.name, ip=pod.address)
        if started.unresolved:
            raise ConfigError(f"pod {pod.name}: variables {started.unresolved} have no value")
        self._privileges = ["--pdeathsig=KILL", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        if not found.unreadable:
            numbers = (who["runAsUser"], who["runAsGroup"], who["fsGroup"])
            self._privileges += map("--{}={}".format, ("reuid", "regid", "groups"), numbers)
        self._environment = {**found.environment, "HOSTNAME": pod.hostname, **started.environment}
        self._pid_file, root = pod.directory / "pid", pod.directory / "root"
        self._pid_file.unlink(missing_ok=True)
        root.mkdir(exist_ok=True)
        user, group = who["runAsUser"], who["runAsGroup"]
        description = {
            "root": str(root),
            "hostname": pod.hostname,
            "files": {
                "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\ntrainer:x:{user}:{group}::{HOME}:/usr/sbin/nologin\n",
                "/etc/group": f"root:x:0:\ntrainer:x:{group}:\n",
                "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
                "/etc/host.conf": "multi on\n",
                "/etc/resolv.conf": "",
            },
            "links": dict(found.links),
            "directories": {"/tmp": (0o1777, 0), "/var/tmp": (0o1777, 0), "/root": (0o755, 0), HOME: (0o755, user)},
            "mounts": [
                *((target, source, True, "") for target, source in found.trees.items()),
                ("/etc/hosts", str(pod.hosts), False, ""),
                *_mounts(pod),
            ],
            "directory": found.directory,
            "privileges": self._privileges,
            "words": list(started.command),
            "env": self._environment,
            "pid_file": str(self._pid_file),
        }
        written = pod.directory / "container.json"
        written.write_text(json.dumps(description), encoding="utf-8")
        with pod.log.open("ab") as out:
            if found.unreadable:
                out.write(f"stand-in: not as user {user}, who could not read {found.unreadable}\n".encode())
                out.flush()
            command = [*pod.enter, sys.executable, "-I", "-S", str(container.__file__), str(written)]
            quiet = subprocess.DEVNULL
            self._launcher = subprocess.Popen(command, stdin=quiet, stdout=out, stderr=out, start_new_session=True)

    @property
    def exit_code(self) -> int | None:
        """How it ended (128 + signal where one ended it); None while it runs."""
        return self._launcher.poll()

    @property
    def pid(self) -> int | None:
        """Its first process as this machine numbers it; None before it is there."""
        return int(self._pid_file.read_text(encoding="ascii")) if self._pid_file.exists() else None

    def send(self, number: signal.Signals) -> bool:
        """Signal its first process; False while that is not there yet. With its end all others in the container end."""
        pid = self.pid
        if pid is None or self.exit_code is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def inside(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The words that run ``words`` in the container, as its user, and their environment."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd"]
        return [*enter, "--", "setpriv", *self._privileges, *words], self._environment

    def end(self) -> None:
        self._launcher.kill()  # the container ends with it
        self._launcher.wait()


def _mounts(pod: Pod) -> Iterator[tuple[str, str | None, bool, str]]:
    """Target, source (None: memory, with the options that come last) and whether it is read-only, of each volume; with
    the owners and modes that the kubelet gives them."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
    group = pod.spec["securityContext"]["fsGroup"]
    for mount in pod.spec["containers"][0]["volumeMounts"]:
        name, target, read_only = mount["name"], mount["mountPath"], mount.get("readOnly", False)
        volume, place = volumes.get(name, {}), pod.directory / "volumes" / name
        claim = pod.own_claims.get(name) or volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None:
            if claim not in pod.claims:
                raise ConfigError(f"there is no PersistentVolumeClaim {claim!r}: the pod would wait for it for ever")
            yield target, str(_owned(pod.claims[claim], group, 0o2775)), read_only, ""
        elif "configMap" in volume:
            for path, text in pod.configs[volume["configMap"]["name"]].items():
                file = _owned(place, group, 0o755) / path
                file.write_text(text, encoding="utf-8")
                file.chmod(0o644)
            yield target, str(place), True, ""
        elif volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")  # tmpfs counts in powers of two anyway
            yield target, None, False, f"mode=1777,gid={group},size={size}"
        else:
            yield target, str(_owned(place, group, 0o2777)), read_only, ""


def _owned(place: Path, group: int, mode: int) -> Path:
    """The directory, which belongs to root and the pod's group since it was made."""
    if not place.exists() or place.stat().st_gid != group:
        place.mkdir(parents=True, exist_ok=True)
        os.chown(place, 0, group)
        place.chmod(mode)
    return place


@dataclass(eq=False)
class Pod:
    """One pod: who it is and whose, what the node gives it, and how it is. The node's thread changes it."""

    name: str
    owner: str
    hostname: str
    index: int
    """The completion index of a Job's pod, or the number of another's."""
    spec: Manifest = field(repr=False)
    labels: Mapping[str, str] = field(repr=False)
    own_claims: Mapping[str, str] = field(repr=False)
    """The claims that were made for it, by name of the volume."""
    enter: Sequence[str] = field(repr=False)
    """The words that start a command in its network."""
    cut: Callable[[], None] = field(repr=False)
    """Takes the network away."""
    address: str
    directory: Path = field(repr=False)
    claims: Mapping[str, Path] = field(repr=False)
    configs: Mapping[str, Mapping[str, str]] = field(repr=False)
    phase: Phase = Phase.PENDING
    exit_code: int | None = None
    restarts: int = 0
    conditions: frozenset[str] = frozenset()
    deleting: bool = False
    left_after_s: float | None = None
    """From SIGTERM to its end, if it was asked to end."""
    killed: bool = False
    """Whether only SIGKILL ended it then."""
    process: Process | None = field(default=None, repr=False)
    prober: Prober | None = field(default=None, repr=False)
    _start_at: float = field(default=0.0, repr=False)
    _asked_at: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self.log, self.hosts = self.directory / "log", self.directory / "hosts"
        self.log.touch()
        self.resolve([])

    @property
    def living(self) -> bool:
        return self.phase not in ENDED

    @property
    def ready(self) -> bool:
        """One that is being ended is not."""
        return self.process is not None and not self.deleting and self.prober is not None and self.prober.ready

    def resolve(self, records: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Write these names to its hosts file, which stays the same one, since it is mounted. Its own name comes
        first, since a resolver takes the first line that fits."""
        known = [("127.0.0.1", ["localhost"]), (self.address, [self.hostname]), *records]
        text = "".join(f"{address} {' '.join(names)}\n" for address, names in known).encode()
        with self.hosts.open("r+b" if self.hosts.exists() else "w+b", buffering=0) as file:
            if file.read() != text:
                file.seek(0)
                file.write(text)
                file.truncate()

    def tick(self, now: float) -> None:
        if self.phase in ENDED:
            return
        if self.process is None:
            if self.deleting:  # it was never started, or waits to be started again: there is no process to signal
                self.exit_code = 128 + signal.SIGKILL if self.exit_code is None else self.exit_code
                self._over(Phase.FAILED)
            elif now >= self._start_at:
                self.process = Process(self)
                self.prober = Prober(self.spec["containers"][0], self.process, self.address)
                self._asked_at, self.phase = None, Phase.RUNNING
        elif (code := self.process.exit_code) is not None:
            self._ended(code, now)
        elif self.prober is not None and self.process.pid is not None:
            self.prober.tick(now)
            if self.deleting or self.prober.unfit:
                self._press(self.process, now)

    def _press(self, process: Process, now: float) -> None:
        if self._asked_at is None:
            self._asked_at, self.killed = now if process.send(signal.SIGTERM) else None, False
        elif not self.killed and now >= self._asked_at + self.spec["terminationGracePeriodSeconds"]:
            self.killed = process.send(signal.SIGKILL)

    def _ended(self, code: int, now: float) -> None:
        self.exit_code, self.process = code, None
        if self._asked_at is not None:
            self.left_after_s = now - self._asked_at
        if self.spec.get("restartPolicy", "Always") == "Always" and not self.deleting:
            self._start_at = now + BACKOFF_S * (self.restarts > 0)
            self.restarts += 1
        else:
            self._over(Phase.SUCCEEDED if code == 0 else Phase.FAILED)

    def _over(self, phase: Phase) -> None:
        self.phase = phase
        self.cut()
