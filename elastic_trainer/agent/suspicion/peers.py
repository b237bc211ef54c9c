"""The port of an agent, and what agents ask each other there: one line of JSON each way.

A refused connection proves to a peer that the agent's process is dead. The kernel of a frozen agent still accepts
connections, but no answer comes: therefore peers send a question. A client whose first line is ``COPIES`` wants the
memory of this agent instead (checkpoint.neighbours).

*Runs in* a thread that answers (``agent-port``), which does nothing else and never blocks on a lock, the store or a
slow peer; questions are asked by the thread that owns the :class:`Asker`.
*Owns* the listening socket, and a bounded number of clients that have not said yet what they want: it closes the oldest
first.
*Fails by* nothing: a line that cannot be parsed is None, and a peer that sends no question gets no answer.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_trainer.checkpoint.neighbours import COPIES
from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.ipc.address import listen
from elastic_trainer.membership.documents import MOST_WORKERS
from elastic_trainer.settings import as_json
from elastic_trainer.telemetry.logs import logger

# ---- question and answer


LONGEST_ANSWER: Final = 1 << 16
_WORKERS_TOLD: Final = 64
"""A longer answer would not fit into a socket buffer."""
Word = Annotated[str, Field(max_length=256)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    run: Word
    node: Word
    """The sending node."""

    def encode(self) -> bytes:
        return as_json(self) + b"\n"


class Question(_Line):
    """What do your workers do?"""


class WorkerActivity(BaseModel):
    """What one worker does."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    local_rank: int = Field(ge=0, lt=MOST_WORKERS)
    phase: Word
    waits: bool = False
    """Whether it waits for other ranks, and for how many seconds."""
    waits_s: float = 0.0
    state: Word = "unknown"
    """The kernel's state of its process, and the seconds that its control thread has been silent, if checked."""
    silent_s: float = 0.0


class StatusAnswer(_Line):
    """What the workers of ``node`` do in ``round``, its newest one as a member (0: none)."""

    round: int = Field(ge=0)
    workers: tuple[WorkerActivity, ...] = ()


LineT = TypeVar("LineT", bound=_Line)


def read(kind: type[LineT], line: bytes) -> LineT | None:
    """``line`` parsed as a question or an answer of this version; None if it is neither."""
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None


# ---- answering


class StatusBoard:
    """This node's present answer: set by one thread, read by another that must not block."""

    def __init__(self, run: str, node: str, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._answer = StatusAnswer(run=run, node=node, round=0)
        self.asked_at = -float("inf")
        """Monotonic time of the last question."""

    def show(self, round_: int, workers: tuple[WorkerActivity, ...]) -> None:
        """Set the answer."""
        update = {"round": round_, "workers": workers[:_WORKERS_TOLD]}
        self._answer = self._answer.model_copy(update=update)

    def answer(self, line: bytes) -> bytes | None:
        """The answer to the question ``line``; None if that is no question of this run."""
        question = read(Question, line)
        if question is None or question.run != self._answer.run:
            return None
        self.asked_at = self._clock.monotonic()
        return self._answer.encode()


LONGEST_QUESTION: Final = 512
MOST_AT_ONCE: Final = 256
LOOKS_UP_S: Final = 1.0
"""How late it notices that it is closing, on systems where shutting down the socket does not wake it."""
_RETRY_S: Final = 0.05
Answering = Callable[[bytes], bytes | None]


class AgentPort:
    """Listens at ``address`` while this process lives.

    Who asks a ``question`` is sent the line ``answer(question)``, unless that is None. Who begins with ``COPIES`` is
    handed to ``lend``, which must not block and owns the socket from then on.
    """

    def __init__(self, address: str, answer: Answering, lend: Callable[[socket.socket], None]) -> None:
        self._listening, self._answer, self._lend = listen(address), answer, lend
        self.port: int = self._listening.getsockname()[1]
        self._closing = False
        self._said: dict[socket.socket, bytes] = {}
        """The bytes received from each client, oldest client first."""
        self._thread = threading.Thread(target=self._run, name="agent-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the thread closes the socket, which it may still be using."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with self._listening, selectors.DefaultSelector() as self._selector:
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
            while not self._closing:
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - the edge of a thread: without answers this node would look frozen
                    logger().exception("agent_port.failed")
                    pause(_RETRY_S)
            for client in list(self._said):
                self._close_client(client)

    def _turn(self) -> None:
        for key, _ in self._selector.select(LOOKS_UP_S):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:
                self._listen(key.fileobj)

    def _accept(self) -> None:
        if len(self._said) >= MOST_AT_ONCE:
            self._close_client(next(iter(self._said)))
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:
            return  # the client has closed already
        except OSError:
            if not self._closing:
                pause(_RETRY_S)  # for example out of descriptors
            return
        client.setblocking(False)
        self._said[client] = b""
        self._selector.register(client, selectors.EVENT_READ)

    def _listen(self, client: socket.socket) -> None:
        try:
            received = client.recv(LONGEST_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        question, end, _ = (self._said[client] + received).partition(b"\n")
        if received and not end and len(question) <= LONGEST_QUESTION:
            self._said[client] = question
            return
        if end and question + end == COPIES:
            self._let_go(client)
            self._lend(client)
            return
        if end and (line := self._answer(question)) is not None:
            with contextlib.suppress(OSError):
                client.send(line)  # cannot block: the send buffer is empty
        self._close_client(client)

    def _close_client(self, client: socket.socket) -> None:
        self._let_go(client)
        client.close()

    def _let_go(self, client: socket.socket) -> None:
        del self._said[client]
        self._selector.unregister(client)


# ---- asking


Address = tuple[socket.AddressFamily, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class PeerReply:
    """The outcome of a question to ``node``: an ``answer``, or just a sign of life (None), or that it is ``dead``."""

    node: str
    after_s: float
    answer: StatusAnswer | None = None
    dead: bool = False


@dataclass(slots=True)
class _Open:
    node: str
    sent_at: float
    connection: socket.socket
    refused: int
    """The immediate error of the connection attempt; 0 if there was none."""
    said: bytes = b""


class Asker:
    """Asks agents without blocking, and collects what they answer."""

    def __init__(self, run: str, node: str, clock: Clock = SYSTEM) -> None:
        self._run, self._clock = run, clock
        self._question: Final = Question(run=run, node=node).encode()
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, _Open] = {}

    @property
    def open(self) -> dict[str, float]:
        """Since when each node's answer is pending."""
        return {name: each.sent_at for name, each in self._open.items()}

    def ask(self, node: str, address: Address) -> None:
        """Ask the agent of ``node``, unless a question to it is pending."""
        if node in self._open:
            return
        family, target = address
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex(target)
        code = 0 if code == errno.EINPROGRESS else code  # the result shows when the socket becomes writable
        self._open[node] = each = _Open(node, self._clock.monotonic(), connection, code)
        self._selector.register(connection, selectors.EVENT_WRITE, each)

    def receive(self, timeout_s: float) -> list[PeerReply]:
        """The outcomes that arrive within ``timeout_s`` seconds."""
        heard = []
        for key, events in self._selector.select(timeout_s):
            found = self._connected(key.data) if events & selectors.EVENT_WRITE else self._listen(key.data)
            if found is not None:
                self.forget(found.node)
                heard.append(found)
        return heard

    def forget(self, node: str) -> None:
        """Drop the question to ``node``."""
        each = self._open.pop(node, None)
        if each is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(each.connection)
            each.connection.close()

    def close(self) -> None:
        for node in list(self._open):
            self.forget(node)
        self._selector.close()

    def _connected(self, each: _Open) -> PeerReply | None:
        """The connection is established, or has failed."""
        code = each.refused or each.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._selector.unregister(each.connection)  # for example no route: that counts as silence
            return self._heard(each, dead=True) if code == errno.ECONNREFUSED else None
        try:
            each.connection.send(self._question)
        except OSError:
            return self._heard(each)  # it was alive, and has closed the connection
        self._selector.modify(each.connection, selectors.EVENT_READ, each)
        return None

    def _listen(self, each: _Open) -> PeerReply | None:
        try:
            received = each.connection.recv(LONGEST_ANSWER)
        except OSError:
            received = b""
        each.said += received
        if received and b"\n" not in received and len(each.said) <= LONGEST_ANSWER:
            return None
        answer = read(StatusAnswer, each.said)
        if answer is None or answer.run != self._run:
            return self._heard(each)  # an agent that supports no questions, or is not in this run
        return self._heard(each, answer, dead=answer.node != each.node)

    def _heard(self, each: _Open, answer: StatusAnswer | None = None, *, dead: bool = False) -> PeerReply:
        return PeerReply(each.node, self._clock.monotonic() - each.sent_at, answer, dead)
