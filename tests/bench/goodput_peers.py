"""The peers of the goodput benchmark: how each launches the job, and an operator who replaces what is gone.

*Runs in* the main thread of the benchmark. *Owns* the nodes of one peer, and what they meet at, until its block ends.
*Invariant*: all peers meet one schedule, and get the same help: a node that is lost is replaced after ``REPLACE_S``; a
job that makes no step for ``STUCK_S``, or has lost the node that it cannot do without, is started again as a whole.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.drills.harness import Harness, harness
from elastic_trainer.drills.stage import IN_PLACE
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node, torchrun
from elastic_trainer.local.etcd import EtcdServer, spawn
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.local.ledger import Line, LineKind
from tests.bench import goodput_job
from tests.bench.recovery import SHARED_STORE_OFF, TUNED
from tests.bench.recovery_torchft import LIGHTHOUSE, MANAGER, Torchft, launched, lighthouse_command
from tests.drills.cluster.schedule import Blow, Timed
from tests.support.small_disk import fill

NODES, LEAST, MOST = 3, goodput_job.LEAST, 4
REPLACE_S, STUCK_S, START_LIMIT_S, RETRY_S = 5.0, 60.0, 180.0, 0.5
MANY = {"failure_limit": "100000", "ttl": "3"}
"""No number of failures ends the run: in a storm they are no sign of a poisoned batch."""
RESTART = MANY | {"last_call": "1", "join_interval": "1", "stop_grace": "1"}
WARM = RESTART | {"preload": "torch:torch._dynamo:elastic_trainer.worker.session"}
"""A new node's first workers start warm too: by itself a node learns only from them what to import."""


Span = tuple[float, float]
"""From when until when, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A blow that really happened, when, and the node that it hit or started ("": none)."""

    blow: Blow
    node: str
    t: float


@dataclass(frozen=True, slots=True)
class Peer:
    """A way to run the job. ``ours``: with a session, whose samples must be exact."""

    name: str
    way: str
    backend: str = "etcd3"
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    python: Path | None = None
    """Of torchft's environment."""

    @property
    def ours(self) -> bool:
        return self.way == "session"

    def as_json(self) -> dict[str, Any]:
        shown = {"backend": self.backend, "rdzv_conf": dict(self.rendezvous), "workers": self.workers}
        return shown | {"job": dict(self.options)}


def peers(torchft_python: Path | None) -> dict[str, Peer]:
    """All of them, by name; torchft where ``torchft_python`` names an environment with it."""
    job = {"snapshot_every_s": "auto", "sharded": False}
    found = [
        Peer("in_place", "session", rendezvous=IN_PLACE | MANY, options=job),
        Peer("in_place_sharded", "session", rendezvous=IN_PLACE | MANY, workers=2, options=job | {"sharded": True}),
        Peer("restart_warm", "session", rendezvous=WARM, options=job | {"snapshot_every_s": 1.0}),
        Peer(
            "restart_cold", "session", rendezvous=RESTART | {"preload": "off"}, options=job | {"snapshot_every_s": 1.0}
        ),
        Peer("c10d", "plain", "c10d", TUNED, SHARED_STORE_OFF, options={"timeout_s": 10.0}),
    ]
    if torchft_python is not None:
        found.append(Peer("torchft", "torchft", "c10d", options={"manager": MANAGER}, python=torchft_python))
    return {peer.name: peer for peer in found}


class Cluster(LocalCluster):
    """The nodes of ``peer``. The first one of a c10d job hosts its store, and a job of torchft has a lighthouse."""

    def __init__(self, spec: ClusterSpec, peer: Peer, *, low: bool) -> None:
        super().__init__(spec)
        self._peer = peer
        self._starter = ["nice", "-n", str(goodput_job.LOW_PRIORITY)] if low else []
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self.host: Node | None = None
        """A node that the job cannot do without."""

    def command(self, name: str) -> list[str]:
        if self._peer.python is None:
            return self._starter + torchrun(self.spec, name, first=not self.running)
        return self._starter + launched(self._peer.python, self.spec)

    def add(self) -> Node:
        alone = not self.running
        node = super().add()
        if alone and self._peer.way == "plain":
            self.host = node
        return node

    def serve(self) -> None:
        if self._peer.python is None or self._lighthouse is not None:
            return
        column = Torchft("torchft", "torchft", python=self._peer.python, lighthouse=LIGHTHOUSE)
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        with (self.spec.directory / "lighthouse.log").open("ab") as log:
            self._lighthouse = spawn(lighthouse_command(column, self.spec.endpoint, LEAST), log)

    def darken(self) -> bool:
        if self._lighthouse is None:
            return False
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._lighthouse = None
        return True

    def stop(self, grace_s: float = 10.0) -> None:
        super().stop(grace_s)
        self.darken()


class _Here:
    def __init__(self, peer: Peer, *, low: bool) -> None:
        self._peer, self._low = peer, low

    def cluster(self, spec: ClusterSpec) -> LocalCluster:
        if self._peer.python is not None:
            options = json.loads(spec.entry[-1]) | {"lighthouse": f"http://{spec.endpoint}"}
            spec = replace(spec, entry=[*spec.entry[:-1], json.dumps(options)])
        return Cluster(spec, self._peer, low=self._low)


@contextmanager
def running(peer: Peer, directory: Path, step_s: float, save_every_s: float, *, low: bool) -> Iterator[Trial]:
    """The job of ``peer`` in ``directory``; its first nodes are starting. ``low``: nodes start at a low priority."""
    options = {"step_s": step_s, "save_every_s": save_every_s, **peer.options}
    spec = ClusterSpec(
        run=f"goodput-{peer.name}",
        directory=directory,
        endpoint="",
        entry=[str(Path(goodput_job.__file__)), peer.way, str(directory), json.dumps(options)],
        min_nodes=LEAST,
        max_nodes=MOST,
        workers=peer.workers,
        max_restarts=100_000,
        backend=peer.backend,
        options=peer.rendezvous,
        environment={"OMP_NUM_THREADS": "1", **peer.environment},
    )
    with harness(spec, _Here(peer, low=low).cluster) as opened:
        trial = Trial(peer, opened, directory)
        trial.begin()
        yield trial


class Trial:
    def __init__(self, peer: Peer, opened: Harness, directory: Path) -> None:
        assert isinstance(opened.cluster, Cluster)
        self.peer, self._harness, self._cluster = peer, opened, opened.cluster
        self._disk = directory / goodput_job.CHECKPOINTS
        self.lines: list[Line] = []
        self.done: list[Struck] = []
        self.helped: Counter[str] = Counter()
        """How often the operator had to act beyond replacing nodes that were killed, or could not strike."""
        self._repairs: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._killed: set[str] = set()
        self._frozen: set[str] = set()
        self._stepped_at = SYSTEM.monotonic()

    def begin(self) -> None:
        self._cluster.serve()
        self._cluster.start(NODES)

    def look(self) -> None:
        new = self._harness.lines()
        self.lines += new
        if any(line.event is LineKind.STEP for line in new):
            self._stepped_at = SYSTEM.monotonic()

    def settle(self, steps: int) -> None:
        """Wait until all nodes have made ``steps`` steps together."""
        deadline, world = Deadline.after(START_LIMIT_S), NODES * self.peer.workers
        while True:
            self.look()
            whole = Counter((line.node, line.local_rank) for line in self.lines if line.world == world and line.step)
            if len(whole) >= world and min(whole.values()) >= steps:
                return
            if deadline.expired or not self._cluster.running:
                logs = [node.log.read_text(errors="replace")[-1500:] for node in self._cluster.nodes]
                raise RuntimeError(f"{self.peer.name} did not begin to train:\n" + "\n".join(logs))
            pause(0.05)

    def calm(self, length_s: float) -> Span:
        began, deadline = SYSTEM.monotonic(), Deadline.after(length_s)
        while not deadline.expired:
            pause(0.2)
        self.look()
        return began, SYSTEM.monotonic()

    def storm(self, schedule: tuple[Timed, ...], length_s: float) -> Span:
        """Strike as scheduled; from when until when.

        What cannot be done yet (no worker runs that could be killed) is tried again, also beyond the end, for as long
        as a start may take; what remains is missing in ``done``. It returns when the job steps again: only then is it
        known which steps the last fault has thrown away.
        """
        began, pending = SYSTEM.monotonic(), list(schedule)
        self._stepped_at, looked, end = began, began, began + length_s
        while (now := SYSTEM.monotonic()) < end + START_LIMIT_S:
            if now >= end and not pending and self._stepped_at > end:
                break
            for blow in [each for each in pending if began + each.at_s <= now]:
                pending.remove(blow)
                t = SYSTEM.monotonic()
                if (node := self._strike(blow)) is not None:
                    self.done.append(Struck(blow.blow, node, t))
                else:
                    pending.append(replace(blow, at_s=t - began + RETRY_S))
            while self._repairs and self._repairs[0][0] <= SYSTEM.monotonic():
                heappop(self._repairs)[2]()
            if now - looked >= RETRY_S:
                self.look()
                self._help()
                looked = now
            pause(0.02)
        return began, end

    def end(self) -> None:
        self._cluster.stop()
        self.look()

    # ---- blows

    def _later(self, seconds: float, repair: Callable[[], None]) -> None:
        heappush(self._repairs, (SYSTEM.monotonic() + seconds, next(self._numbers), repair))

    def _strike(self, blow: Timed) -> str | None:
        """Do it; the node that it struck ("" for none), or None if that is not possible at this moment."""
        match blow.blow:
            case Blow.JOIN:
                return self._cluster.add().name
            case Blow.OUTAGE:
                return self._outage(blow.lasts_s)
            case Blow.FULL_DISK:
                return self._fill(blow.lasts_s)
        awake = [node for node in self._cluster.running if node.name not in self._frozen]
        for node in (awake[(blow.pick + number) % len(awake)] for number in range(len(awake))):
            if blow.blow is Blow.WORKER_KILL and node.kill_worker(blow.pick % self.peer.workers) is None:
                continue
            if blow.blow is Blow.NODE_KILL:
                self._killed.add(node.name)
                if node.kill() is None:
                    continue
                self._later(REPLACE_S, self._replace)
            if blow.blow is Blow.FREEZE:
                if len(awake) == 1 or not node.freeze():
                    continue
                self._frozen.add(node.name)
                self._later(blow.lasts_s, lambda node=node: self._thaw(node))  # type: ignore[misc]
            return node.name
        return None

    def _thaw(self, node: Node) -> None:
        self._frozen.discard(node.name)
        node.thaw()

    def _replace(self) -> None:
        if len(self._cluster.running) < NODES:
            self._cluster.add()

    def _outage(self, lasts_s: float) -> str | None:
        """Of what nodes meet at, etcd or a lighthouse. A c10d job has it in one of its nodes, and is spared."""
        if self._harness.meeting is None:
            if self._cluster.darken():
                self._later(lasts_s, self._cluster.serve)
            else:
                self.helped["outages of a service that it has not"] += 1
            return ""
        server = self._harness.meeting.etcd
        assert isinstance(server, EtcdServer)
        if not server.is_healthy():
            return None  # the last outage goes on
        server.kill()
        assert not server.is_healthy(), "etcd answers although it was killed"
        self._later(lasts_s, server.restart)
        return ""

    def _fill(self, lasts_s: float) -> str | None:
        if (self._disk / "ballast").exists():
            return None
        self._later(lasts_s, fill(self._disk).unlink)
        return ""

    # ---- the operator

    def _help(self) -> None:
        """Replace nodes that have given up; start a job again that nothing else would bring back."""
        cluster = self._cluster
        for node in cluster.nodes:
            if not node.running and node.name not in self._killed:
                self._killed.add(node.name)
                self.helped["nodes that gave up"] += 1
                self._later(REPLACE_S, self._replace)
        lost = cluster.host is not None and not cluster.host.running
        if lost or SYSTEM.monotonic() - self._stepped_at > STUCK_S:
            self.helped["whole restarts"] += 1
            self._restart()

    def _restart(self) -> None:
        cluster, self._stepped_at = self._cluster, SYSTEM.monotonic()
        for node in cluster.running:
            self._killed.add(node.name)
            node.kill()
        self._frozen.clear()
        cluster.host = None
        if self.peer.way == "plain":
            cluster.spec = replace(cluster.spec, endpoint=f"{HOST}:{free_ports(1)[0]}")
        self._later(REPLACE_S, self._refill)

    def _refill(self) -> None:
        self._cluster.serve()
        while len(self._cluster.running) < NODES:
            self._cluster.add()
