"""Detects frozen nodes and hung workers long before a lease or a time limit ends, by asking when workers wait.

While steps finish in time nothing is sent. When a worker of this node waits in a collective for longer than usual, this
agent asks those of the neighbouring nodes whether they live: one line of JSON each way, on the port that also proves
whether an agent lives. A refused connection proves that the agent's process is dead; the kernel of a frozen one still
accepts connections, but no answer comes. It suspects an agent that does not answer in time, and breaks the round
without that node. Each agent that is asked checks its own workers, and excludes one that hangs.

A client whose first line is ``COPIES`` wants the memory of this agent instead (checkpoint.neighbours): an agent has one
port for other nodes.

*Runs in* the agent: a thread named ``suspicion``, which blocks on no peer, and one that answers (``agent-port``), which
does nothing else and never blocks on a lock, the store or a slow peer.
*Owns* those threads, the open questions, the listening socket, and a bounded number of clients that have not said yet
what they want: it closes the oldest first.
*Fails by* nothing: nodes that it cannot ask because of the store or the network stay unknown, and without an answer,
leases and time limits still apply; a line that cannot be parsed gets none.
*Invariant*: time in which this agent was frozen counts against no node or worker; a node counts as silent only after
more time than recent answers took, this node's own included.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.conductor import SUSPECTED_S, Worker
from elastic_trainer.agent.workers.conductor_shell import ConductorShell
from elastic_trainer.agent.workers.hang_rules import Waiting, starved_s
from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.agent.workers.watchdog import ping, process_state, queued_s
from elastic_trainer.checkpoint.neighbours import COPIES
from elastic_trainer.clock import SYSTEM, Clock, Deadline, pause
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.address import LOOPBACK, listen, refusal_proves
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import ACCEPTS, Ghost, RoundDocument, join_address
from elastic_trainer.settings import as_json
from elastic_trainer.telemetry.logs import logger

TURN_S: Final = 0.03
IDLE_S: Final = 0.25
"""Seconds between two looks while this node trains, and while it does not."""
ASKED_EVERY_S: Final = 0.5
LOOKED_AT_S: Final = 2 * ASKED_EVERY_S
"""Seconds after another agent's question during which this node checks its own workers."""
PINGED_EVERY_S: Final = 0.1


class Suspicion(PeriodicThread):
    """The thread ``suspicion``; see the module. ``seen(pid, reason, state)`` is called for a worker that is left
    behind, with the kernel's state of it."""

    def __init__(
        self,
        conductor: ConductorShell,
        pages: Pages,
        port: AgentPort,
        peers: Peers,
        clock: Clock = SYSTEM,
        seen: Callable[[int, str, str], None] = lambda pid, reason, state: None,
    ) -> None:
        self._conductor, self._pages, self._port, self._peers, self._seen = conductor, pages, port, peers, seen
        super().__init__("suspicion", self._listen, clock)
        self._document: RoundDocument | None = None
        self._since: dict[int, Waiting] = {}
        """For each worker that waits for others: its last progress, and when it was first seen to wait since then."""
        self._states: dict[int, str] = {}
        """The state of each worker's process at the last check."""
        self._counts_from = self._looked_at = clock.monotonic()
        """Nothing before this time counts: this agent was frozen, or in another round."""
        self._asked_at = self._suspected_at = self._pinged_at = -math.inf
        self._logged_round = -1
        """The round in which the last suspicion was logged."""
        self._pause_s = IDLE_S

    def close(self) -> None:
        super().close()
        self._peers.close()

    def _listen(self) -> float:
        """Process the peers' answers until the next look, then look."""
        self._peers.receive(self._pause_s)
        self.turn()
        return 0.0

    def turn(self) -> None:
        now = self._clock.monotonic()
        document, workers = self._conductor.at_work()
        if now - self._looked_at > self._pause_s + LATE_S or document is not self._document:
            self._counts_from = now
        if document is not self._document and (document is None or hang_rules.needed(document)):
            self._peers.forget(but=() if document is None else [each.node for each in hang_rules.needed(document)])
        self._looked_at, self._document = now, document
        readings = {each.pid: each for each in self._pages.glance()}
        waits = self._waits(readings, now)
        self._pause_s = IDLE_S if document is None else TURN_S
        if document is None:
            return
        if not hang_rules.needed(document) or now - self._port.asked_at < LOOKED_AT_S:
            self._look_at(document, workers, readings, now)
        left_s = min(
            (hang_rules.patience_s(readings[pid].pulse.step_s) - waits[pid] for pid in waits), default=math.inf
        )
        if left_s <= 0.0 and hang_rules.needed(document):
            self._find_out(document, now)
        else:
            self._asked_at = -math.inf
            self._pause_s = min(TURN_S, left_s)

    def _waits(self, readings: Mapping[int, Reading], now: float) -> dict[int, float]:
        """How long each worker that waits for others has done so."""
        seeking = [each for each in readings.values() if hang_rules.seeks_others(each)]
        self._since = Waiting.seen(self._since, seeking, now)
        return {pid: now - max(each.since, self._counts_from) for pid, each in self._since.items()}

    # ---- other nodes

    def _find_out(self, document: RoundDocument, now: float) -> None:
        """Ask the neighbours: this node's workers have waited for others for too long."""
        if self._suspected_at >= self._counts_from:
            if now - self._suspected_at < SUSPECTED_S:
                return  # the last suspicion may still be in progress
            self._peers.forget()  # it had no effect: start over
            self._suspected_at = self._asked_at = -math.inf
        if now - self._asked_at >= ASKED_EVERY_S:
            self._asked_at = now
            self._peers.ask(document)
        suspects = self._peers.suspects(now, self._counts_from)
        if suspects is not None:
            self._suspected_at = now
            names = [each.node for each in suspects.nodes]
            again, self._logged_round = self._logged_round == document.number, document.number
            log = logger().debug if again else logger().warning  # a node that is itself cut off suspects all others
            log("node.suspected", nodes=names, round=document.number, reason=suspects.reason)
            self._conductor.suspect(document, suspects.nodes, suspects.reason)

    # ---- this node

    def _look_at(
        self, document: RoundDocument, workers: list[Worker], readings: Mapping[int, Reading], now: float
    ) -> None:
        """Others wait: exclude a worker of this node that hangs."""
        before, self._states = self._states, {}
        asks = now - self._pinged_at >= PINGED_EVERY_S
        self._pinged_at = now if asks else self._pinged_at
        for worker in workers:
            if worker.stuck or (not hang_rules.needed(document) and worker.free_for() > document.number):
                continue
            state = process_state(worker.pid)
            silent_s = now - max(worker.pinged_at, self._counts_from) if worker.pinged_at else 0.0
            limit_s = worker.delays.limit_s(hang_rules.PONG_S, now)
            if silent_s > limit_s:  # do not blame the worker for a busy machine
                silent_s -= starved_s(queued_s(worker.pid), worker.queued)
            self._states[worker.pid] = state
            why = hang_rules.stuck(readings.get(worker.pid), state, silent_s, limit_s)
            if why is not None and before.get(worker.pid) == state:  # twice in a row
                self._seen(worker.pid, why, state)
                self._conductor.exclude(worker, why)
            elif asks and not worker.pinged_at:
                ping(worker, now)


# ---- the neighbours


STORE_S: Final = 0.5
LATE_S: Final = 0.1
"""This agent was frozen if a turn comes this much later than planned, in seconds."""
FORGOTTEN_S: Final = 5.0
"""A longer answer says nothing about normal delays."""
Nodes = Callable[[Sequence[str], Deadline], Mapping[str, NodeView]]


@dataclass(frozen=True, slots=True)
class Suspects:
    """Keys of nodes that do not answer, and the evidence."""

    nodes: tuple[Ghost, ...]
    reason: str


class Peers:
    """The neighbouring agents: asks whether they live, and finds those that do not answer.

    ``nodes(names, deadline)`` reads the keys of those nodes.
    """

    def __init__(self, run: str, node: str, nodes: Nodes, clock: Clock = SYSTEM, asker: Asker | None = None) -> None:
        self._node, self._nodes, self._clock = node, nodes, clock
        self._asker = asker if asker is not None else Asker(run, node, clock)
        self._number = -1
        self._around: dict[str, Address] = {}
        """The nodes that this one asks in the round of that number, including itself."""
        self._delays: dict[str, hang_rules.AnswerDelays] = {}
        self._dead: set[str] = set()
        self._own_s = float("inf")
        """Seconds that this node's last answer to itself took."""

    def ask(self, document: RoundDocument) -> None:
        """Ask the neighbours in the round of ``document`` to which no question is pending."""
        if document.number != self._number:
            self._meet(document)
        for name, address in self._around.items():
            self._asker.ask(name, address)

    def forget(self, but: Iterable[str] = ()) -> None:
        """Drop all open questions except those to ``but``.

        A connection attempted while the network was cut says nothing about its present state, and the delay of a
        process that was frozen is no measure.
        """
        for name in set(self._asker.open) - set(but):
            self._asker.forget(name)
        self._dead &= set(but)

    def _meet(self, document: RoundDocument) -> None:
        """Look up the neighbours' addresses. One that announces a loopback address, unlike this node, stays unknown."""
        self.forget()
        names = hang_rules.neighbours(document, self._node)
        keys = self._read((*names, self._node))
        own = keys[self._node].record.address if self._node in keys else LOOPBACK
        known = {name: each.record for name, each in keys.items() if refusal_proves(own, each.record.address)}
        found = {name: _address(each.address, each.probe_port) for name, each in known.items()}
        self._around = {name: address for name, address in found.items() if address is not None}
        if self._around:
            self._number = document.number

    def receive(self, timeout_s: float) -> None:
        """Process the answers that arrive within ``timeout_s`` seconds."""
        before = self._clock.monotonic()
        heard = self._asker.receive(timeout_s)
        now = self._clock.monotonic()
        stood_still = now - before > timeout_s + LATE_S
        for each in heard:
            if each.dead:
                self._dead.add(each.node)
                continue
            self._dead.discard(each.node)
            if not stood_still:
                self._delays.setdefault(each.node, hang_rules.AnswerDelays()).add(each.after_s, now)
            if each.node == self._node:
                self._own_s = each.after_s
        for name, since in self._asker.open.items():
            if now - since > FORGOTTEN_S:
                self._asker.forget(name)

    def suspects(self, now: float, awake_at: float) -> Suspects | None:
        """The nodes that are dead, or silent for too long; silence before ``awake_at`` does not count."""
        asked = {name: since for name, since in self._asker.open.items() if name in self._around}
        open_ = {name: now - max(since, awake_at) for name, since in asked.items()}
        at = {name: join_address(str(address[0]), int(address[1])) for name, (_, address) in self._around.items()}
        reasons = {
            name: f"node {name} does not answer its peer {self._node} at {at[name]} ({silent_s:.2f} s)"
            + (f", {ACCEPTS}" if self._asker.accepts(name) else "")
            for name, silent_s in open_.items()
        }
        silent = [name for name, silent_s in open_.items() if silent_s > self._limit_s(name, now)]
        reasons |= {name: f"the agent of node {name} is dead" for name in self._dead}
        found = [name for name in self._around if name in (*silent, *self._dead) and name != self._node]
        keys = self._read(found) if found else {}
        if not keys:
            return None
        return Suspects(tuple(each.ghost for each in keys.values()), "; ".join(reasons[name] for name in keys))

    def _limit_s(self, name: str, now: float) -> float:
        own_s = self._asker.open.get(self._node)
        own_s = self._own_s if own_s is None else now - own_s
        lately = [self._delays.get(each, hang_rules.AnswerDelays()) for each in (name, self._node)]
        return max(hang_rules.TIMES_OWN * own_s, *(each.limit_s(hang_rules.ANSWER_S, now) for each in lately))

    def close(self) -> None:
        self._asker.close()

    def _read(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        try:
            return self._nodes(names, Deadline.after(STORE_S, self._clock))
        except ElasticTrainerError as error:
            logger().debug("peers.unknown", error=str(error))
            return {}


def _address(host: str, port: int) -> Address | None:
    """The socket address; None if the host cannot be resolved or has no port."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return (family, target) if port else None


# ---- question and answer


LONGEST_ANSWER: Final = 1 << 16
Word = Annotated[str, Field(max_length=256)]


class AgentLine(BaseModel):
    """What agents say to each other: the question whether another one lives, and the answer that it does."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    run: Word
    node: Word
    """The sending node."""
    round: int = 0
    """Agents of before expect one in an answer."""

    def encode(self) -> bytes:
        return as_json(self) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """``line``; None if it is none of this version."""
        try:
            return cls.model_validate_json(line)
        except ValidationError:
            return None


# ---- answering


LONGEST_QUESTION: Final = 512
MOST_AT_ONCE: Final = 256
LOOKS_UP_S: Final = 1.0
"""How late it notices that it is closing, on systems where shutting down the socket does not wake it."""
_RETRY_S: Final = 0.05


class AgentPort:
    """Listens at ``address`` while this process lives.

    Who asks in this ``run`` is sent a sign of life; others get no answer. Who begins with ``COPIES`` is handed to
    ``lend``, which must not block and owns the socket from then on.
    """

    def __init__(
        self, address: str, run: str, node: str, lend: Callable[[socket.socket], None], clock: Clock = SYSTEM
    ) -> None:
        self._run, self._answer, self._clock = run, AgentLine(run=run, node=node).encode(), clock
        self._listening, self._lend = listen(address), lend
        self.port: int = self._listening.getsockname()[1]
        self.asked_at = -math.inf
        """Monotonic time of the last question."""
        self._closing = False
        self._said: dict[socket.socket, bytes] = {}
        """The bytes received from each client, oldest client first."""
        self._thread = threading.Thread(target=self._serve, name="agent-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the thread closes the socket, which it may still be using."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
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
        if end and (asked := AgentLine.read(question)) is not None and asked.run == self._run:
            self.asked_at = self._clock.monotonic()
            with contextlib.suppress(OSError):
                client.send(self._answer)  # cannot block: the send buffer is empty
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
    """The outcome of a question to ``node``: a sign of life, or that it is ``dead``."""

    node: str
    after_s: float
    dead: bool = False


@dataclass(slots=True)
class _Open:
    node: str
    sent_at: float
    connection: socket.socket
    refused: int
    """The immediate error of the connection attempt; 0 if there was none."""
    said: bytes = b""
    accepted: bool = False
    """Whether the connection is established: a kernel does that for a frozen process too."""


class Asker:
    """Asks agents without blocking, and collects what they answer."""

    def __init__(self, run: str, node: str, clock: Clock = SYSTEM) -> None:
        self._run, self._clock = run, clock
        self._question: Final = AgentLine(run=run, node=node).encode()
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, _Open] = {}

    @property
    def open(self) -> dict[str, float]:
        """Since when each node's answer is pending."""
        return {name: each.sent_at for name, each in self._open.items()}

    def accepts(self, node: str) -> bool:
        """Whether at least the machine of ``node``, whose answer is pending, has accepted the connection."""
        return node in self._open and self._open[node].accepted

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
        each.accepted = True
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
        answer = AgentLine.read(each.said)
        known = answer is not None and answer.run == self._run  # else it supports no questions, or is not in this run
        return self._heard(each, dead=known and answer is not None and answer.node != each.node)

    def _heard(self, each: _Open, *, dead: bool = False) -> PeerReply:
        return PeerReply(each.node, self._clock.monotonic() - each.sent_at, dead)
