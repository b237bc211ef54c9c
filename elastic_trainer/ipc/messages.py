"""The messages between a node's agent and its workers: typed, versioned, one JSON object per line.

Every message about a round carries the round's number: messages may overtake each other, and none may undo a later one.
*Fails by* MessageError for a line that is not a message of this version.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from elastic_trainer.errors import PermanentError
from elastic_trainer.settings import as_json

CHANNEL_VERSION = 2
LONGEST_LINE = 1 << 20


class MessageError(PermanentError):
    """The other end sent a line that is not a message of this version."""


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return as_json(self) + b"\n"


class StateReport(BaseModel):
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
    state: StateReport | None = None
    step_time_s: float = 0.0
    joinable: bool = True
    """Whether newcomers may join the next round: not in the middle of an evaluation, which they could not continue."""
    in_call: bool = False
    """Whether the script is in the middle of a call that all ranks make."""
    met: str = ""
    """The nonce of the newest round whose ranks this process has met: all of them stood at one place of the script."""


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
    """The worker exits: ``done`` (its work is finished), ``stopped`` (asked to leave) or ``failed``."""

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
    """This worker's place in round ``number``."""

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

    ``next`` is this worker's place in the next round; None for a worker that leaves.
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
