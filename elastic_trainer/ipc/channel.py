"""What a node's agent and its workers say to each other: typed messages, one JSON object per line of a unix socket.

Every message about a round carries the round's number: messages may overtake each other, and none may undo a later one.

*Runs in* the agent (one thread accepts, one reads each worker) and in each worker (its control thread reads).
*Owns* the socket and its private directory; the next agent removes the directory of a killed one.
*Fails by* ChannelClosedError when the other end is gone, MessageError for a line that is no message of this version.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elastic_trainer.clock import pause
from elastic_trainer.errors import PermanentError, RejoinError
from elastic_trainer.ipc.folders import PrivateFolder
from elastic_trainer.settings import as_json
from elastic_trainer.telemetry.logs import logger

CHANNEL_VERSION = 4
LONGEST_LINE = 1 << 20


class MessageError(PermanentError):
    """The other end sent a line that is not a message of this version."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return as_json(self) + b"\n"


class Identity(BaseModel):
    """The training state that a worker holds: committed in ``round``, after ``step`` steps."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    round: int
    step: int
    epoch: int = 0
    samples: int = 0
    """Samples of ``epoch`` already used."""
    batch: int = 0
    """Samples of the next step, if known."""


# ---- worker to agent


class Hello(Message):
    """First message of a worker. ``mutex`` is a file whose robust mutex it holds while it lives."""

    kind: Literal["hello"] = "hello"
    version: int = CHANNEL_VERSION
    pid: int
    local_rank: int
    mutex: str | None = None


class Ready(Message):
    """The worker is free for round ``number`` or any later one, and holds ``state`` (None: a newcomer)."""

    kind: Literal["ready"] = "ready"
    number: int
    planned: bool = False
    state: Identity | None = None
    step_time_s: float = 0.0
    joinable: bool = True
    """Whether newcomers may join the next round: not in the middle of an evaluation, which they could not continue."""
    in_call: bool = False
    """Whether the script is in the middle of a call that all ranks make."""
    left_behind: bool = False
    """Whether the others have gone on from where the script is here: only a new process could join them."""
    met: tuple[str, ...] = ()
    """The nonces of the rounds whose ranks this process has met where it is in the script, newest first."""


class Failed(Message):
    """A collective of round ``number`` failed here.

    ``forming``: while its groups formed, not later, while ranks come to one state; ``tried``: at which address a peer
    was not reached then, if known; ``loopback``: the interfaces to which the user bound gloo here, if no other host
    reaches them. ``given_up``: none failed, but this rank gives the step up.
    """

    kind: Literal["failed"] = "failed"
    number: int
    error: str
    forming: bool = False
    given_up: bool = False
    tried: str = ""
    loopback: str = ""


class Progress(Message):
    """The worker's progress; sent at a bounded rate."""

    kind: Literal["progress"] = "progress"
    round: int
    step: int
    epoch: int
    samples: int
    loss: float | None = None
    checkpoint: str | None = None
    step_time_s: float = 0.0


class Evicted(Message):
    """The worker received SIGTERM: its node wants to leave by a planned change."""

    kind: Literal["evicted"] = "evicted"
    reason: str


class Pong(Message):
    """The answer to Ping."""

    kind: Literal["pong"] = "pong"


class Leaving(Message):
    """The worker exits: ``done`` (its work is finished), ``stopped`` (asked to leave), ``restarted`` (an operator wants
    another in its place) or ``failed``."""

    kind: Literal["leaving"] = "leaving"
    status: Literal["done", "stopped", "restarted", "failed"]
    step: int
    reason: str = ""


# ---- agent to worker


class Welcome(Message):
    """The answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    version: int = CHANNEL_VERSION
    run: str
    node: str


class Formation(Message):
    """This worker's assignment in round ``number``."""

    kind: Literal["formation"] = "formation"
    number: int
    nonce: str
    store: str
    rank: int
    world_size: int
    nodes: tuple[str, ...] = ()
    reason: str = ""


class Over(Message):
    """All rounds up to ``number`` are broken."""

    kind: Literal["over"] = "over"
    number: int
    reason: str


class Drain(Message):
    """Leave round ``number`` at the step boundary that all its ranks agree on.

    ``next`` is this worker's assignment in the next round; None for a worker that leaves.
    """

    kind: Literal["drain"] = "drain"
    number: int
    reason: str
    waits: bool = False
    """Too few nodes will be left to continue: save a checkpoint, then wait for others."""
    next: Formation | None = None


class Ping(Message):
    """Checks that the process is alive; its link's thread answers at once."""

    kind: Literal["ping"] = "ping"


class Exit(Message):
    """Exit at once with ``code``."""

    kind: Literal["exit"] = "exit"
    code: int
    reason: str


FromWorker: TypeAlias = Hello | Ready | Failed | Progress | Evicted | Pong | Leaving
FromAgent: TypeAlias = Welcome | Formation | Over | Drain | Ping | Exit

_FROM_WORKER: TypeAdapter[FromWorker] = TypeAdapter(Annotated[FromWorker, Field(discriminator="kind")])
_FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="kind")])


def read_from_worker(line: bytes) -> FromWorker:
    """Parse a line that a worker sent."""
    try:
        return _FROM_WORKER.validate_json(line)
    except ValidationError as error:
        raise MessageError(
            f"a worker sent a line that is not a message of channel version {CHANNEL_VERSION}: {line[:80]!r}"
        ) from error


def read_from_agent(line: bytes) -> FromAgent:
    """Parse a line that the agent sent."""
    try:
        return _FROM_AGENT.validate_json(line)
    except ValidationError as error:
        raise MessageError(
            f"the agent sent a line that is not a message of channel version {CHANNEL_VERSION}: {line[:80]!r}"
        ) from error


SEND_TIMEOUT_S = 5.0
_RETRY_S = 0.1
_PREFIX = "elastic-trainer-agent-"
_UCRED = struct.Struct("3i")
_LONGEST_ADDRESS = 107
"""Bytes of a unix socket's address on Linux (unix(7)); a TMPDIR of a batch system may be longer."""


class ChannelClosedError(RejoinError):
    """The other end of the channel is gone."""


class Connection:
    """One end of a connected channel. Sending is thread-safe and bounded in time; only one thread may read."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_TIMEOUT_S), 0))
        self._lock = threading.Lock()

    def peer(self) -> tuple[int, int]:
        """The peer's process id and user id, from the kernel."""
        pid, uid, _ = _UCRED.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return pid, uid

    def fileno(self) -> int:
        """-1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Raises ChannelClosedError when the other end is gone or does not read."""
        try:
            with self._lock:
                self._socket.sendall(message.encode())
        except OSError as error:
            raise ChannelClosedError(f"the channel is closed: {error}") from error

    def lines(self) -> Iterator[bytes]:
        """Complete lines until the other end closes."""
        pending = b""
        while True:
            try:
                received = self._socket.recv(65536)
            except OSError:
                return
            if not received:
                return
            *complete, pending = (pending + received).split(b"\n")
            if len(pending) > LONGEST_LINE:
                return
            yield from complete

    def close(self) -> None:
        """Close; a reader in another thread ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """The agent's end: a socket in a directory that only this user can enter.

    ``serve(connection)`` is called in a separate thread for each worker, and returns when the worker is gone.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self._serve, self._closing = serve, False
        self._folder = PrivateFolder(_PREFIX)
        self.path = self._folder.path / "agent.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _address(self.path) as address:
                self._socket.bind(address)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            self._folder.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="channel", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if not self._closing:
                    pause(_RETRY_S)  # for example out of descriptors
                continue
            connection = Connection(connected)
            pid, uid = connection.peer()
            if uid != os.geteuid():
                logger().warning("channel.refused", pid=pid, reason=f"it belongs to another user, {uid}")
                connection.close()
                continue
            try:
                threading.Thread(target=self._run, args=(connection,), name=f"worker-{pid}", daemon=True).start()
            except RuntimeError as error:  # the limit of processes is reached
                logger().warning("channel.refused", pid=pid, reason=str(error))
                connection.close()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except Exception:  # noqa: BLE001 - the edge of a thread: the worker is treated as gone
            logger().exception("channel.failed")
        finally:
            connection.close()

    def close(self) -> None:
        """Stop listening and remove the directory; open connections stay."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._folder.close()


def connect(path: Path) -> Connection:
    """The worker's end. Raises ChannelClosedError when the agent does not listen."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(path) as address:
            connected.connect(address)
    except OSError as error:
        connected.close()
        raise ChannelClosedError(f"the node's agent does not listen at {path}: {error}") from error
    return Connection(connected)


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """``path`` as an address of a unix socket: if it is too long for one, by way of its open directory."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
