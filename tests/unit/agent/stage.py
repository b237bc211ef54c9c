"""A conductor without threads: workers are lists of messages, records are kept, and the test moves time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from elastic_trainer.agent.workers.conductor import Conductor, ConductorConfig, Reached, WorkerFacts
from elastic_trainer.agent.workers.conductor_shell import ConductorPorts, ConductorShell, RecordWriter
from elastic_trainer.ipc.channel import ChannelClosedError, Connection, Identity, Message, Progress, Ready
from elastic_trainer.membership.documents import NodeRecord, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.writes import RoundFailure
from tests.support.memory_store import ManualClock

BASE = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=29500, probe_port=1)
KEY = 77
"""The create-revision of this node's key."""
PID = 2**30
"""No process has this id: workers get it and those behind it."""
OTHER = RoundMember(node="other", create_revision=5, life=1, first_rank=1, local_world_size=1)
Kind = TypeVar("Kind", bound=Message)
AskPort = Callable[[tuple[str, ...], Callable[[Reached], None]], object]


class Jumping(ManualClock):
    """A clock on which every wait is over at once, when its time has passed."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(timeout_s)
        return event.is_set()


class Break(NamedTuple):
    """A round that was to be broken, and what the node shows with it."""

    failure: RoundFailure
    record: NodeRecord


class Notebook:
    """Keeps everything instead of writing it to a store."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self.breaks: list[Break] = []

    def announce(self, record: NodeRecord) -> None:
        self.records.append(record)

    def break_round(self, failure: RoundFailure, record: NodeRecord, within_s: float | None = None) -> None:
        self.records.append(record)
        self.breaks.append(Break(failure, record))


class Line:
    """The agent's end of a connection to process ``pid``: keeps what is sent."""

    def __init__(self, pid: int = PID, *, closed: bool = False) -> None:
        self.pid, self.closed = pid, closed
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        if self.closed:
            raise ChannelClosedError("closed")
        self.sent.append(message)

    def peer(self) -> tuple[int, int]:
        return self.pid, 0

    def close(self) -> None:
        self.closed = True


class Worker:
    def __init__(self, stage: Stage, local_rank: int = 0) -> None:
        self._conductor, self._line = stage.conductor, Line(PID + local_rank)
        self.seat = stage.conductor.admit(cast("Connection", self._line), self._line.pid, local_rank)
        """None if it was refused."""

    @property
    def pid(self) -> int:
        return self._line.pid

    @property
    def heard(self) -> list[Message]:
        return self._line.sent

    @property
    def connected(self) -> bool:
        return not self._line.closed

    def say(self, message: Message) -> None:
        assert self.seat is not None
        self._conductor.receive(self.seat, message)

    def ready(self, number: int, step: int | None = None, *, planned: bool = False, **position: int) -> None:
        state = None if step is None else Identity(round=number - 1, step=step, **position)
        self.say(Ready(number=number, planned=planned, state=state))

    def progress(self, round: int, step: int) -> None:
        self.say(Progress(round=round, step=step, epoch=0, samples=0))

    def die(self) -> None:
        """Its agent learns that it is gone."""
        assert self.seat is not None
        self._conductor.gone(self.seat)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.heard if isinstance(message, kind)]

    def one(self, kind: type[Kind]) -> Kind:
        (found,) = self.of(kind)
        return found


class Stage:
    """The conductor of node ``me``, whose key has been shown, and whose workers are never busy."""

    def __init__(self, ask: AskPort = lambda nodes, answered: answered(Reached()), sever_s: float = 30.0) -> None:
        self.clock, self.notebook = ManualClock(), Notebook()
        self.progress: list[Progress] = []
        self.committed: dict[int, tuple[int, int]] = {}
        """What the pages of workers say: round and step, by process."""
        self.hung: dict[int, str] = {}
        """Why processes were killed."""
        self.busy, self.queued_s = "", 0.0
        """What workers are busy with, and how long they have waited for a CPU."""
        self.killed: list[int] = []
        facts = WorkerFacts(
            lambda: KEY,
            lambda pid: self.hung.pop(pid, None),
            self.committed.get,
            lambda pid: self.busy,
            lambda pid: {"main": self.queued_s},
        )
        writer = cast("RecordWriter", self.notebook)
        ports = ConductorPorts(writer, self.progress.append, ask, lambda pid, reason: self.killed.append(pid))
        self.core = Conductor(ConductorConfig("run", "me", BASE, sever_s), facts)
        self.conductor = ConductorShell(self.core, ports, self.clock)  # its thread is never started

    def run_for(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        end = self.clock.monotonic() + seconds
        while (due_at := self.core.outbox.next_at) <= end:
            self.clock.advance(max(0.0, due_at - self.clock.monotonic()) + 1e-9)
            self.conductor._turn()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    def record(self) -> NodeRecord:
        return self.notebook.records[-1]

    @property
    def only_break(self) -> Break:
        (found,) = self.notebook.breaks
        return found

    def begin(self, size: int = 1) -> None:
        self.notebook.announce(self.conductor.begin(size))

    def working(self, number: int = 1, **more: Any) -> Worker:
        """One worker, new, in round ``number``."""
        self.begin()
        worker = Worker(self)
        worker.ready(number)
        self.see(number, **more)
        return worker

    def member(self, first_rank: int = 0, size: int = 1) -> RoundMember:
        """This node, in its present life."""
        return RoundMember(
            node="me", create_revision=KEY, life=self.conductor.life, first_rank=first_rank, local_world_size=size
        )

    def see(self, number: int, state: RoundState = RoundState.ACTIVE, **more: Any) -> RoundDocument:
        """The round document is, or becomes, this: by default with this node first and one other."""
        document = self.document(number, state, **more)
        self.conductor.see(document)
        return document

    def document(self, number: int, state: RoundState = RoundState.ACTIVE, **more: Any) -> RoundDocument:
        values: dict[str, Any] = {"members": (self.member(), OTHER), "store": "127.0.0.1:29500"} | more
        return RoundDocument(number=number, nonce=f"r{number}", state=state, **values)
