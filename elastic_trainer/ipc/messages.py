"""The messages between a node's agent and its workers: typed, versioned, one JSON object a line.

Every message that concerns a round carries its number: messages overtake each other, and none may undo a later one.
*Fails by* MessageError for a line that is no message of this version.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elastic_trainer.errors import PermanentError

CHANNEL_VERSION = 2
LONGEST_LINE = 1 << 20


class MessageError(PermanentError):
    """The other end speaks another language."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class StateReport(BaseModel):
    """The training state that a worker holds: committed in ``round``, after ``step`` steps."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    round: int
    step: int
    digest: str = ""
    epoch: int = 0
    samples: int = 0
    """How far it is in the data: samples of ``epoch`` used."""
    batch: int = 0
    """How many samples the next step takes, where that is known."""


# ---- worker to agent


class Hello(Message):
    """First message of a worker. ``mutex`` is a file whose robust mutex it holds as long as it lives."""

    kind: Literal["hello"] = "hello"
    version: int = CHANNEL_VERSION
    pid: int
    local_rank: int
    mutex: str | None = None


class Ready(Message):
    """The worker is free for round ``number`` or any later one, with the state that it names (None: a newcomer)."""

    kind: Literal["ready"] = "ready"
    number: int
    planned: bool = False
    state: StateReport | None = None
    step_time_s: float = 0.0
    joinable: bool = True
    """Whether newcomers may be in the next round: not in the middle of an evaluation, where they could not follow."""
    newcomer: bool = False
    """Whether this process has never been where the others are, in no round."""


class Failed(Message):
    """A collective of round ``number`` failed here; ``forming``: before the round had begun."""

    kind: Literal["failed"] = "failed"
    number: int
    error: str
    forming: bool = False


class Progress(Message):
    """How far the worker is; sent at a bounded rate."""

    kind: Literal["progress"] = "progress"
    round: int
    step: int
    epoch: int
    samples: int
    loss: float | None = None
    checkpoint: str | None = None
    step_time_s: float = 0.0


class Evicted(Message):
    """The worker was asked to end (SIGTERM): its node wants to leave by a planned change."""

    kind: Literal["evicted"] = "evicted"
    reason: str


class Pong(Message):
    """The answer to Ping."""

    kind: Literal["pong"] = "pong"


class Leaving(Message):
    """The worker ends: ``done`` (its work is finished), ``stopped`` (asked to leave) or ``failed``."""

    kind: Literal["leaving"] = "leaving"
    status: Literal["done", "stopped", "failed"]
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
    """Round ``number`` with this worker's place in it."""

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
    """Round ``number`` is to be left at the step boundary that all its ranks agree on.

    ``next`` is this worker's place afterwards; None for a worker that leaves.
    """

    kind: Literal["drain"] = "drain"
    number: int
    reason: str
    waits: bool = False
    """Too few nodes will be left to go on: save a checkpoint, then wait for others."""
    next: Formation | None = None


class Ping(Message):
    """Is the process alive? Its link's thread answers at once."""

    kind: Literal["ping"] = "ping"


class Exit(Message):
    """End at once with ``code``: there is nothing left to do here."""

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
            f"a worker sent what is no message of channel version {CHANNEL_VERSION}: {line[:80]!r}"
        ) from error


def read_from_agent(line: bytes) -> FromAgent:
    """Parse a line that the agent sent."""
    try:
        return _FROM_AGENT.validate_json(line)
    except ValidationError as error:
        raise MessageError(
            f"the agent sent what is no message of channel version {CHANNEL_VERSION}: {line[:80]!r}"
        ) from error
