"""Rules of suspicion: when a wait is too long, which nodes to ask, and what proves a node or worker stuck. Pure.

A wrong suspicion costs one step, so it may come early; but it must not recur on a busy machine. So the time limit
follows from the delays of recent answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.agent.workers.hang_rules import FRESH_STEPS
from elastic_trainer.ipc.page import WORK, Reading
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from elastic_trainer.model import Phase

LEAST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 2.0
STEPS: Final = 3.0
"""How many of its own step times a worker may wait before its agent asks, within these two bounds."""
ANSWER_S: Final = 0.2
"""Minimum time limit for an answer of another node's agent."""
PONG_S: Final = 0.5
"""Minimum time limit for an answer of a worker's control thread to its agent."""
TIMES_LATE: Final = 2.0
"""The limit as a multiple of the longest recent answer. Answers are few and their times have a long tail, so the
maximum says more than the spread."""
TIMES_OWN: Final = 4.0
"""The limit as a multiple of this node's answer to itself at the same time."""
LONGEST_DELAY_S: Final = 1.0
"""An answer that took longer than this does not come from a busy machine but from a frozen process."""
REMEMBERED_S: Final = 60.0
_KEPT: Final = 32
NEIGHBOURS: Final = 4
"""Members before and after a node in the list that it asks: so eight nodes ask each one, however large the round."""


@dataclass(slots=True)
class AnswerDelays:
    """Durations of the recent answers of one node or worker."""

    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, seconds: float, now: float) -> None:
        """Add an answer that took ``seconds``."""
        if seconds <= LONGEST_DELAY_S:
            self._seen.append((now, seconds))

    def limit_s(self, least_s: float, now: float) -> float:
        """Time limit of the next answer, in seconds."""
        lately = [seconds for at, seconds in self._seen if now - at <= REMEMBERED_S]
        return max(least_s, TIMES_LATE * max(lately, default=0.0))


def patience_s(step_s: float) -> float:
    """How long a worker whose steps take ``step_s`` waits for others before its agent asks their agents, in seconds."""
    return min(LONGEST_WAIT_S, max(LEAST_WAIT_S, STEPS * step_s))


def seeks_others(reading: Reading) -> bool:
    """Whether this worker only waits for others: in a collective, or while a group forms."""
    return reading.waits or reading.phase is Phase.RENDEZVOUS


def needed(document: RoundDocument) -> tuple[RoundMember, ...]:
    """The members without which training cannot continue."""
    if document.state not in (RoundState.ACTIVE, RoundState.DRAINING):
        return ()
    return document.next.members if document.next is not None else document.members


def neighbours(document: RoundDocument, node: str) -> tuple[str, ...]:
    """The nodes that ``node`` asks: its neighbours in the list of members."""
    names = [member.node for member in needed(document)]
    if node not in names:
        return ()
    mine, count = names.index(node), len(names)
    near = [names[(mine + step) % count] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)]
    return tuple(dict.fromkeys(name for name in near if name != node))


def stuck(reading: Reading | None, state: str, silent_s: float, limit_s: float) -> str | None:
    """Why a worker that others wait for is stuck, in words; None if nothing indicates it.

    ``state`` is the kernel's state of its process, ``silent_s`` the seconds that its control thread has not answered.
    A debugger is no fault, and a worker that saves, evaluates, heals or compiles may hold the interpreter for a while.
    """
    if state == "stopped":
        return "its process is stopped"
    busy = reading is None or reading.phase not in WORK or reading.pulse.fresh < FRESH_STEPS
    if state == "traced" or busy or silent_s <= limit_s:
        return None
    return f"it has answered nothing for {silent_s:.1f} s (state: {state})"
