"""What the tests of the conductor stand on: an announcer that keeps what it is told, and workers that are sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic_trainer.agent.workers.conduct import Conduct, ConductorPorts
from elastic_trainer.agent.workers.conductor import Conductor
from elastic_trainer.agent.workers.kill import Verdicts
from elastic_trainer.agent.workers.reachability import Reachability
from elastic_trainer.agent.workers.record_writer import RecordWriter
from elastic_trainer.ipc.channel import Connection, connect
from elastic_trainer.ipc.messages import Hello, Message, Progress, Ready, StateReport, read_from_agent
from elastic_trainer.membership.documents import Ghost, NodeRecord, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Cause
from tests.support.crew import eventually

BASE = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=29500, probe_port=1)
KEY = 77
"""The create-revision of this node's key."""
Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True, slots=True)
class Break:
    number: int
    reason: str
    record: NodeRecord
    worker_failed: bool
    cause: Cause | None = None
    suspects: tuple[Ghost, ...] = ()


class Notebook(RecordWriter):
    """Keeps everything instead of writing it to a store."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self.breaks: list[Break] = []

    def announce(self, record: NodeRecord) -> None:
        self.records.append(record)

    def break_round(
        self,
        number: int,
        reason: str,
        record: NodeRecord,
        *,
        worker_failed: bool,
        cause: Cause | None = None,
        suspects: tuple[Ghost, ...] = (),
        within_s: float | None = None,
    ) -> None:
        self.records.append(record)
        self.breaks.append(Break(number, reason, record, worker_failed, cause, suspects))

    def close(self) -> None:
        """Nothing runs."""

    @property
    def record(self) -> NodeRecord:
        """The newest."""
        return self.records[-1]


class Worker:
    """A connection to the conductor, and all that came through it."""

    def __init__(self, conductor: Conductor, local_rank: int = 0, **hello: Any) -> None:
        self.connection: Connection = connect(conductor.path)
        self.heard: list[Message] = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.say(Hello(pid=1, local_rank=local_rank, **hello))

    def say(self, message: Message) -> None:
        self.connection.send(message)

    def ready(self, number: int, step: int | None = None, *, planned: bool = False, **place: int) -> None:
        state = None if step is None else StateReport(round=number - 1, step=step, **place)
        self.say(Ready(number=number, planned=planned, state=state))

    def progress(self, round: int, step: int) -> None:
        self.say(Progress(round=round, step=step, epoch=0, samples=0))

    def of(self, kind: type[Kind]) -> list[Kind]:
        """All messages of this kind so far."""
        return [message for message in list(self.heard) if isinstance(message, kind)]

    def await_one(self, kind: type[Kind], count: int = 1) -> Kind:
        """Wait for the ``count``-th message of this kind."""
        eventually(lambda: len(self.of(kind)) >= count, lambda: f"no {kind.__name__} {count} in {self.heard}")
        return self.of(kind)[count - 1]

    def _listen(self) -> None:
        for line in self.connection.lines():
            self.heard.append(read_from_agent(line))
        self.connection.close()
        self.ended.set()


@dataclass
class Stage:
    """A conductor of node ``me`` with its notebook and the progress that it passed on."""

    conductor: Conductor
    notebook: Notebook
    progress: list[Progress] = field(default_factory=list)
    committed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What the pages of workers say: round and step, by process."""

    def begin(self, size: int = 1) -> None:
        """torchrun starts workers."""
        self.notebook.announce(self.conductor.begin(size))

    def await_record(self, **values: Any) -> NodeRecord:
        """Wait until the newest record has these values."""

        def holds() -> bool:
            return all(getattr(self.notebook.record, name) == value for name, value in values.items())

        eventually(holds, lambda: f"{values} not in {self.notebook.record}")
        return self.notebook.record

    def await_break(self, count: int = 1) -> Break:
        """Wait until the round was marked broken ``count`` times."""
        eventually(lambda: len(self.notebook.breaks) >= count, "no round was broken")
        return self.notebook.breaks[count - 1]

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


OTHER = RoundMember(node="other", create_revision=5, life=1, first_rank=1, local_world_size=1)


def conductor_of(
    notebook: Notebook,
    on_progress: Callable[[Progress], None],
    committed: Callable[[int], tuple[int, int] | None],
    reachability: Reachability,
) -> Conductor:
    """That of node ``me``, whose workers are never busy."""
    ports = ConductorPorts(notebook, on_progress, lambda: KEY, reachability, Verdicts(), committed, lambda pid: "")
    return Conductor(Conduct("run", "me", BASE), ports)


@contextmanager
def staged() -> Iterator[Stage]:
    """A conductor whose node's key has been shown, no workers yet."""
    notebook, progress = Notebook(), list[Progress]()
    committed = dict[int, tuple[int, int]]()
    conductor = conductor_of(notebook, progress.append, committed.get, Reachability(dict))
    try:
        yield Stage(conductor, notebook, progress, committed)
    finally:
        conductor.close()
