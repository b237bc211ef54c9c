"""The jobs whose recovery is measured: one script under several launch configurations, faults, and their cost.

Times are monotonic seconds of one host. What did not happen within its limit counts as infinite, never as missing.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.local.cluster import ClusterSpec
from elastic_trainer.local.etcd import spawn
from elastic_trainer.local.hosts import free_ports
from tests.support.plainjob import SCRIPT, SteppingCluster

TWIN = str(Path(__file__).with_name("recovery_job.py"))
STEADY_STEPS = 25
"""Steps between two faults, so that each meets a job that is at work."""
_NUMBERS = itertools.count(1)
_ASKED, _FORMED = "Rendezvous'ing worker group", "Rendezvous complete for workers"
_STAMP = re.compile(r"^I\d{4} (\d\d):(\d\d):(\d\d\.\d+) ", re.MULTILINE)
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Column:
    """One way to launch the job. ``endpoint`` None: a free port of this host (torchrun's own store)."""

    name: str
    backend: str
    endpoint: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    script: Sequence[str] = (str(SCRIPT),)
    in_place: bool = False
    """Whether members stay in their processes: then torchrun has no part in it, nor a rendezvous of its own."""

    def as_json(self) -> dict[str, object]:
        return {"backend": self.backend, "rdzv_conf": dict(self.options), "environment": dict(self.environment)}

    def job(self, place: Path) -> Job:
        """A job launched in this way, 2 to 3 nodes; nothing runs yet."""
        return Job(self, place)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a fault cost: until the next step, standing still, and in the rendezvous (see :meth:`Job.rendezvous_s`)."""

    seconds: float
    pause_s: float = math.nan
    rendezvous_s: float = math.nan

    @property
    def recovered(self) -> bool:
        return math.isfinite(self.seconds)


LOST = Cost(math.inf, math.inf, math.inf)


class Job(SteppingCluster):
    """Nodes of ``column``, 2 to 3. A context manager: leaving it kills everything at once."""

    def __init__(self, column: Column, place: Path, *, least: int = 2, most: int = 3) -> None:
        number = next(_NUMBERS)
        directory = place / f"{column.name}-{number}"
        directory.mkdir(parents=True)
        self._in_place = column.in_place
        super().__init__(
            ClusterSpec(
                run=f"bench-{os.getpid()}-{number}",
                directory=directory,
                endpoint=column.endpoint or f"127.0.0.1:{free_ports(1)[0]}",
                entry=[*column.script, str(directory)],
                min_nodes=least,
                max_nodes=most,
                max_restarts=1000,
                backend=column.backend,
                options=column.options,
                environment={"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO", **column.environment},
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.running:
            node.kill()
        self.stop()

    def lives(self) -> dict[str, tuple[int, int]]:
        """Round and process of the newest step of each running node."""
        last = {node.name: self.last(node.name) for node in self.running}
        return {name: (step.round, step.pid) for name, step in last.items() if step is not None}

    def await_world(self, world: int, limit_s: float, before: Mapping[str, tuple[int, int]] | None = None) -> bool:
        """Wait until all running nodes step in a world of this size, in a later life than ``before``.

        False at the limit, and as soon as too few nodes are left for it.
        """
        deadline = Deadline.after(limit_s)
        while not self._all_in(world, before or {}):
            if deadline.expired or len(self.running) < world:
                return False
            pause(0.02)
        return True

    def _all_in(self, world: int, before: Mapping[str, tuple[int, int]]) -> bool:
        last = {node.name: self.last(node.name) for node in self.running}
        return len(last) == world and all(
            step is not None and step.world == world and (step.round, step.pid) != before.get(name)
            for name, step in last.items()
        )

    def settle(self, limit_s: float) -> None:
        goals = {node.name: len(self.steps(node.name)) + STEADY_STEPS for node in self.running}
        deadline = Deadline.after(limit_s)
        while any(len(self.steps(name)) < goal for name, goal in goals.items()) and not deadline.expired:
            pause(0.02)

    def cost(self, t: float, before: Mapping[str, tuple[int, int]], survivors: Sequence[str]) -> Cost:
        """Of a fault at ``t``, from the survivors' lines: their first step in a new life."""
        first, last = math.inf, -math.inf
        for name in survivors:
            steps = self.steps(name)
            later = [step.t for step in steps if step.t > t and (step.round, step.pid) != before[name]]
            earlier = [step.t for step in steps if (step.round, step.pid) == before[name]]
            first, last = min([first, *later[:1]]), max([last, *earlier[-1:]])
        return Cost(first - t, first - last, self.rendezvous_s())

    def rendezvous_s(self) -> float:
        """The newest rendezvous: from the moment the last node asked for it until the last one had its answer."""
        if self._in_place:
            return math.nan
        asked = [_stamps(self.log(node.name), _ASKED) for node in self.running]
        formed = [_stamps(self.log(node.name), _FORMED) for node in self.running]
        if not all(asked) or not all(formed):
            return math.nan
        return (max(each[-1] for each in formed) - max(each[-1] for each in asked)) % _DAY_S


def _stamps(log: str, event: str) -> list[float]:
    """Seconds of the day at which torchrun logged ``event``."""
    found = []
    for line in log.splitlines():
        if event in line and (stamp := _STAMP.match(line)):
            hours, minutes, seconds = stamp.groups()
            found.append(int(hours) * 3600.0 + int(minutes) * 60.0 + float(seconds))
    return found


def start(job: Job, nodes: int, limit_s: float) -> Cost:
    """From the start of ``nodes`` nodes to the first step of all."""
    t = SYSTEM.monotonic()
    job.start(nodes)
    if not job.await_world(nodes, limit_s):
        return LOST
    return Cost(max(job.steps(node.name)[0].t for node in job.nodes) - t, rendezvous_s=job.rendezvous_s())


def join(job: Job, limit_s: float) -> Cost:
    """A node is started beside a working job: until it takes part, and how long the others stand still for it."""
    job.settle(limit_s)
    before, members = job.lives(), [node.name for node in job.running]
    t = SYSTEM.monotonic()
    job.add()
    return job.cost(t, before, members) if job.await_world(len(members) + 1, limit_s, before) else LOST


def kill_worker(job: Job, victim: str, limit_s: float) -> Cost:
    """One worker is killed: until the others' next step, with everybody back in."""
    job.settle(limit_s)
    before, world = job.lives(), len(job.running)
    killed = job.node(victim).kill_worker()
    if killed is None or not job.await_world(world, limit_s, before):
        return LOST
    return job.cost(killed.t, before, [name for name in before if name != victim])


def kill_node(job: Job, victim: str, limit_s: float) -> Cost:
    """All of one node is killed: until the others' next step."""
    job.settle(limit_s)
    before, world = job.lives(), len(job.running) - 1
    killed = job.node(victim).kill()
    if killed is None or not job.await_world(world, limit_s, before):
        return LOST
    return job.cost(killed.t, before, [name for name in before if name != victim])


LIGHTHOUSE = {"heartbeat_timeout_ms": 200, "join_timeout_ms": 1000, "quorum_tick_ms": 10}
MANAGER = {"timeout": 5.0, "quorum_timeout": 20.0, "connect_timeout": 5.0, "heartbeat_interval": 0.05}
"""As fast as torchft is on a busy machine of 2 cores without losing living members: survivors wait until the dead one's
heartbeat has run out. A ``join_timeout_ms`` below that would be faster, but throws out whoever is late for a step."""
START_LIMIT_S, IMPORT_LIMIT_S = 60.0, 120.0
_VERSIONS = """
from importlib.metadata import distributions
import torch, torchft, torchft.ddp, torchft.manager, torchft.optim, torchft.process_group
names = [d.name + ' ' + d.version for d in distributions() if d.name.startswith('torchft')]
print(*names, 'torch ' + torch.__version__, sep=', ')
"""


def look(python: Path | None) -> dict[str, str]:
    """The ``versions`` of torchft and torch in an environment, or the reason why torchft is ``skipped``."""
    if python is None:
        return {"skipped": "not asked for: --torchft-python names no environment"}
    try:
        asked = subprocess.run(
            [str(python), "-c", _VERSIONS], capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"skipped": f"{python}: {error}"}
    said = (asked.stderr if asked.returncode else asked.stdout).strip().rpartition("\n")[2]
    if asked.returncode != 0:
        return {"skipped": f"{python}: {said or f'exit code {asked.returncode}'}"}
    if not lighthouse(python).is_file():
        return {"skipped": f"{python}: there is no {lighthouse(python).name} beside it"}
    return {"versions": said}


def lighthouse(python: Path) -> Path:
    return python.with_name("torchft_lighthouse")


@dataclass(frozen=True, slots=True)
class Torchft(Column):
    """torchft with these options of its lighthouse and its Manager (seconds); without any, its defaults."""

    python: Path = Path("python")
    lighthouse: Mapping[str, int] = field(default_factory=dict)
    manager: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {"backend": self.backend, "lighthouse": dict(self.lighthouse), "manager_s": dict(self.manager)}

    def job(self, place: Path) -> Job:
        """A job launched in this way, with a lighthouse of its own; nothing runs yet."""
        return TorchftJob(self, place)


def peers(python: Path, quick: bool) -> dict[str, Torchft]:
    """The configurations, by name: tuned, and at full size torchft's defaults."""

    default = Torchft("torchft_default", "torchft", script=(TWIN, "torchft"), in_place=True, python=python)
    tuned = replace(default, name="torchft_tuned", lighthouse=LIGHTHOUSE, manager=MANAGER)
    return {column.name: column for column in ([tuned] if quick else [tuned, default])}


class TorchftJob(Job):
    """Nodes of ``column`` and their lighthouse. Leaving it kills everything at once."""

    def __init__(self, column: Torchft, place: Path, *, least: int = 2, most: int = 3) -> None:
        super().__init__(column, place, least=least, most=most)
        self._column = column
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self.spec.directory / "lighthouse.log").open("ab") as log:
            self._lighthouse = spawn(lighthouse_command(self._column, self.spec.endpoint, self.spec.min_nodes), log)
        host, port = self.spec.endpoint.split(":")
        deadline = Deadline.after(START_LIMIT_S)
        while not _listens(host, int(port)) and self._lighthouse.poll() is None and not deadline.expired:
            pause(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()

    def command(self, name: str) -> list[str]:
        """The launcher of one replica group, a torchrun of its own."""
        waits = [f"{name}={value:g}" for name, value in self._column.manager.items()]
        return [*launched(self._column.python, self.spec), f"http://{self.spec.endpoint}", *waits]


def launched(python: Path, spec: ClusterSpec) -> list[str]:
    """The program of one replica group, below a torchrun of its own."""
    launcher = [str(python), "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*launcher, "--nnodes=1", "--nproc-per-node=1", f"--max-restarts={spec.max_restarts}", *spec.entry]


def lighthouse_command(column: Torchft, endpoint: str, least: int) -> list[str]:
    flags = [f"--{name}={value}" for name, value in column.lighthouse.items()]
    return [str(lighthouse(column.python)), f"--bind={endpoint}", f"--min_replicas={least}", *flags]


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True
