"""The question of one agent to another, and the answer: one line of JSON each, on a separate connection.

*Fails by* nothing: a line that cannot be parsed is None.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.membership.documents import MOST_WORKERS
from elastic_trainer.settings import as_json

LONGEST_ANSWER = 1 << 16
_WORKERS_TOLD = 64
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
