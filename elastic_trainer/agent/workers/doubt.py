"""When somebody is waited for too long, whom to ask then, and what speaks against a node or a worker. Pure.

A suspicion that is wrong costs one step, so it may come early; it must not come again and again on a machine that is
busy. So what counts as too late follows from how late answers have been.
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
"""Steps of its own that a worker may wait before that is too long, within these two bounds."""
ANSWER_S: Final = 0.2
"""What the agent of another node gets to answer, at least."""
PONG_S: Final = 0.5
"""What a worker's control thread gets to answer its agent, at least."""
TIMES_LATE: Final = 2.0
"""How much longer than the longest answer that was seen lately another one may take. Answers are few, and their times
have a long tail, so their spread says less than their maximum."""
TIMES_OWN: Final = 4.0
"""How much longer than this node's own answer to itself, in the same moment, another's may take."""
LONGEST_DELAY_S: Final = 1.0
"""An answer that took longer than this is no sign of a busy machine: somebody had stood still."""
REMEMBERED_S: Final = 60.0
_KEPT: Final = 32
NEIGHBOURS: Final = 4
"""Members before and behind a node in the list that it asks: each is asked by eight, and by no crowd."""


@dataclass(slots=True)
class AnswerDelays:
    """How long the last answers of somebody took."""

    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def note(self, seconds: float, now: float) -> None:
        """One took ``seconds``."""
        if seconds <= LONGEST_DELAY_S:
            self._seen.append((now, seconds))

    def limit_s(self, least_s: float, now: float) -> float:
        """How long the next one may take."""
        lately = [seconds for at, seconds in self._seen if now - at <= REMEMBERED_S]
        return max(least_s, TIMES_LATE * max(lately, default=0.0))


def patience_s(step_s: float) -> float:
    """How long a worker whose steps take ``step_s`` waits for others before its agent asks where they are."""
    return min(LONGEST_WAIT_S, max(LEAST_WAIT_S, STEPS * step_s))


def seeks_others(reading: Reading) -> bool:
    """Whether this worker does nothing but wait for others: in a collective, or in a group that is formed."""
    return reading.waits or reading.phase is Phase.RENDEZVOUS


def needed(document: RoundDocument) -> tuple[RoundMember, ...]:
    """The members without whom training cannot go on."""
    if document.state not in (RoundState.ACTIVE, RoundState.DRAINING):
        return ()
    return document.next.members if document.next is not None else document.members


def neighbours(document: RoundDocument, node: str) -> tuple[str, ...]:
    """Whom ``node`` asks: those next to it in the list of members."""
    names = [member.node for member in needed(document)]
    if node not in names:
        return ()
    mine, count = names.index(node), len(names)
    near = [names[(mine + step) % count] for step in range(-NEIGHBOURS, NEIGHBOURS + 1)]
    return tuple(dict.fromkeys(name for name in near if name != node))


def stuck(reading: Reading | None, state: str, silent_s: float, limit_s: float) -> str | None:
    """Why a worker that others wait for will not come, in words; None if nothing says so.

    ``state`` is the kernel's word for its process, ``silent_s`` how long its control thread has not answered.
    A debugger is no fault, and whoever saves, evaluates, heals or compiles may hold the interpreter for a while.
    """
    if state == "stopped":
        return "its process is stopped"
    busy = reading is None or reading.phase not in WORK or reading.pulse.fresh < FRESH_STEPS
    if state == "traced" or busy or silent_s <= limit_s:
        return None
    return f"it has answered nothing for {silent_s:.1f} s (state: {state})"
