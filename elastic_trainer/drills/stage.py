"""The stage of a drill: a real etcd, real nodes that train in place, and everything that is known of them.

*Runs in* the main thread of the command or test.
*Owns* what its harness owns, until its block ends; the directory is the caller's.
*Fails by* DrillError when something does not come about in time, when it was not done, or when a signal asks to end.
*Invariant*: after the block no process of the stage is left, however the drill ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.drills.harness import Clusters, Harness, RunStore, harness
from elastic_trainer.drills.job import DIGESTS, STACKS_SIGNAL, STOP_FILE, Sharded
from elastic_trainer.drills.measure import Book, Digest, Standing, read_digest, split_worker
from elastic_trainer.errors import PermanentError
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import ClusterSpec, LocalCluster, Node
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer
from elastic_trainer.local.hosts import Segment
from elastic_trainer.local.ledger import FileTail, end_of
from elastic_trainer.local.processes import Interrupts
from elastic_trainer.membership.documents import RoundDocument

JOB = ("-m", "elastic_trainer.drills.job")
POLL_S = 0.02
SETTLED_STEPS = 12
"""Steps in a round after which it counts as quiet; workers that live that long never back off from joining."""
STACKS_S = 0.5
"""What workers get to write their stacks."""
IN_PLACE = {
    "recovery": "in_place",
    "last_call": "1",
    "join_interval": "0.5",
    "session_timeout": "600",  # the job is known to open one, however slow the machine
}


class DrillError(PermanentError):
    """What the drill needs did not happen."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drill is played with. ``limit_s`` bounds each wait; ``options`` are the rendezvous's."""

    nodes: int = 3
    min_nodes: int = 2
    max_nodes: int = 3
    workers: int = 1
    """Of each node."""
    etcd_members: int = 1
    samples: int = 2048
    width: int = 256
    pause_s: float = 0.02
    reduction: str = "ddp"
    device: str = "cpu"
    backend: str = "auto"
    sharded: Sharded | None = None
    wedges: bool = False
    """Whether workers get stuck when they are asked to (see drills/job)."""
    entry: tuple[str, ...] = JOB
    """What torchrun runs; it takes the job's options."""
    save_every_s: float | None = None
    group_timeout_s: float | None = None
    outage_s: float = 60.0
    """How long an outage or a load lasts."""
    limit_s: float = 90.0
    options: Mapping[str, str] = field(default_factory=dict)

    def job(self, directory: Path) -> tuple[str, ...]:
        given = {
            "directory": directory, "samples": self.samples, "width": self.width, "pause": self.pause_s,
            "reduction": self.reduction, "device": self.device, "backend": self.backend, "sharded": self.sharded,
            "save-every": self.save_every_s, "group-timeout": self.group_timeout_s,
        }  # fmt: skip
        words = (word for name, value in given.items() if value is not None for word in (f"--{name}", str(value)))
        return (*self.entry, *words, *["--wedges"] * self.wedges)


class Stage:
    """See the module; :func:`staged` opens one."""

    def __init__(self, setting: Setting, harness: Harness, interrupts: Interrupts | None) -> None:
        self.setting, self.cluster, self._harness, self._interrupts = setting, harness.cluster, harness, interrupts
        self.directory, self.run = harness.cluster.spec.directory, harness.cluster.spec.run
        self.meeting = cast("RunStore", harness.meeting)
        """etcd, and what is in it."""
        self.book = Book()
        self.history: list[RoundDocument] = []
        self._gone: set[str] = set()

    @property
    def server(self) -> EtcdServer:
        """The etcd server, with ``etcd_members=1``."""
        return cast("EtcdServer", self.meeting.etcd)

    @property
    def servers(self) -> EtcdCluster:
        """The etcd servers, with more."""
        return cast("EtcdCluster", self.meeting.etcd)

    @property
    def segment(self) -> Segment:
        """The network between the nodes' hosts, where they have hosts of their own."""
        return cast("Segment", self.cluster.segment)

    # ---- looking

    def observe(self) -> Standing | None:
        """Take in what has happened; who trains now."""
        self.book.add(self._harness.ledger.read())
        self.documents()
        return self.book.standing()

    def documents(self) -> list[RoundDocument]:
        """All versions of the round document so far."""
        self.history += [document for document, _ in self._harness.documents()]
        return self.history

    @property
    def document(self) -> RoundDocument | None:
        return self.documents()[-1] if self.documents() else None

    def until(self, holds: Callable[[], Any], what: str, limit_s: float | None = None) -> Any:
        """Wait until ``holds()`` is true, and return it. DrillError at the limit."""
        limit_s = self.setting.limit_s if limit_s is None else limit_s
        deadline = Deadline.after(limit_s)
        while not (found := holds()):
            if self._interrupts is not None and self._interrupts.signal is not None:
                raise DrillError(f"stopped by signal {self._interrupts.signal}")
            if deadline.expired:
                self._dump_stacks()
                raise DrillError(f"{what} did not come about in {limit_s:g} s: {self.describe()}")
            pause(POLL_S)
        return found

    def _dump_stacks(self) -> None:
        """Let workers that train write to their logs where they are."""
        workers = [(node, number) for node in self.cluster.running for number in range(self.setting.workers)]
        for worker in (node.worker(number) for node, number in workers):
            if worker is not None and self.book.has_opened(worker.pid):
                processes.send([worker], STACKS_SIGNAL)
        pause(STACKS_S)

    def describe(self) -> str:
        """What is known, for the message of a failure."""
        standing, document = self.observe(), self.document
        told = []
        if standing is not None:
            told.append(f"round {standing.round} stepped with {' '.join(standing.nodes)} of {standing.world}")
        if document is not None:
            nodes = " ".join(member.node for member in document.members)
            told.append(f"round document {document.number} {document.state} [{nodes}] {document.reason}")
        told += [f"{node.name} ended with {node.exit_code()}" for node in self.cluster.nodes if not node.running]
        return "; ".join(told) or "nothing has happened"

    # ---- waiting

    @property
    def expected(self) -> set[str]:
        """Nodes that should be training: they run, and were not asked to go."""
        return {node.name for node in self.cluster.running if node.name not in self._gone}

    def await_steps(self, steps: int = SETTLED_STEPS) -> Standing:
        """Wait until all expected nodes train together, and have committed ``steps`` steps in that."""
        found: Standing = self.until(lambda: self._together(steps), f"a round of {' '.join(sorted(self.expected))}")
        return found

    def _together(self, steps: int) -> Standing | None:
        standing = self.observe()
        if standing is None or set(standing.nodes) != self.expected or standing.world != len(standing.pids):
            return None
        if len(standing.pids) != len(standing.nodes) * self.setting.workers:
            return None
        if standing.least_steps() < steps:
            return None
        # Of a process that was just killed nothing has been written yet.
        workers = [(self.worker(name), pid) for name, pid in standing.pids.items()]
        there = all(each is not None and each.pid == pid and processes.alive(each) for each, pid in workers)
        return standing if there else None

    def await_resumed(self, pids: Collection[int], t: float, round_: int, what: str) -> float:
        """When all of ``pids`` had committed a step after ``t`` in ``round_`` or later, once they have five."""
        self.until(lambda: self.observe() and self.book.resumed_at(pids, t, round_, 5), what)
        found = self.book.resumed_at(pids, t, round_)
        if found is None:
            raise DrillError(f"{what}: the steps are gone")
        return found

    # ---- acting

    def node(self, name: str) -> Node:
        return self.cluster.node(name)

    def worker(self, name: str) -> psutil.Process | None:
        """The process of the worker called ``name``; None if it does not run."""
        node, local_rank = split_worker(name)
        return self.node(node).worker(local_rank)

    def retire(self, name: str) -> None:
        """``name`` is not expected to train any more."""
        self._gone.add(name)

    def welcome(self, name: str) -> None:
        """``name`` is expected again."""
        self._gone.discard(name)

    def restore(self) -> None:
        """Start nodes in the place of those that are gone, and wait until all train."""
        while len(self.expected) < self.setting.nodes:
            self.cluster.add()
        self.await_steps()

    def finish(self) -> list[str]:
        """End the job; what was wrong about the way it ended."""
        members = sorted(self.await_steps().nodes)
        ended = [node for node in self.cluster.nodes if not node.running and node.name not in self._gone]
        problems = [f"node {node.name} ended by itself with {node.exit_code()}" for node in ended]
        (self.directory / STOP_FILE).touch()
        self.until(lambda: not self.cluster.running, "the end of the job")
        self.observe()
        codes = {name: self.node(name).exit_code() for name in members}
        if any('"ledger.differs"' in node.log.read_text(errors="replace") for node in self.cluster.nodes):
            problems.append("ranks had different ledgers")
        return problems + [f"node {name} exited with {code}" for name, code in codes.items() if code != 0]

    def digests(self) -> list[Digest]:
        files = sorted((self.directory / DIGESTS).glob("*.jsonl"))
        found = [read_digest(text) for path in files for text in FileTail(path).read()]
        return [each for each in found if each is not None]

    def log_tails(self) -> list[str]:
        """The last words of each node."""
        return [f"{node.name}: {line}" for node in self.cluster.nodes for line in end_of(node.log)[-5:]]


@contextmanager
def staged(
    setting: Setting, directory: Path, clusters: Clusters = LocalCluster, interrupts: Interrupts | None = None
) -> Iterator[Stage]:
    """A stage of ``setting`` in ``directory``, whose first nodes have been started."""
    spec = ClusterSpec(
        run=f"drill-{secrets.token_hex(4)}",
        directory=directory,
        endpoint="",
        entry=setting.job(directory),
        min_nodes=setting.min_nodes,
        max_nodes=setting.max_nodes,
        workers=setting.workers,
        max_restarts=1000,
        options=IN_PLACE | dict(setting.options),
        environment={"ELASTIC_TRAINER_LOG_LEVEL": "info"},
    )
    with harness(spec, clusters, setting.etcd_members) as opened:
        opened.cluster.start(setting.nodes)
        yield Stage(setting, opened, interrupts)


def now() -> float:
    """Seconds on the clock that the ledger uses."""
    return SYSTEM.monotonic()
