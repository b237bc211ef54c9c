"""Says in the log why a round that is broken has no successor yet, once for each reason that lasts.

*Runs in* the deciding thread. *Owns* nothing but what it has said. *Fails by* nothing.
"""

from __future__ import annotations

from typing import Final

from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.rules import Decision
from elastic_trainer.telemetry.logs import logger

WORTH_SAYING_S: Final = 1.0


class Delays:
    """See the module."""

    def __init__(self) -> None:
        self._wait: tuple[int, str] | None = None
        self._since = 0.0
        self._said = False

    def note(self, current: RoundDocument | None, decision: Decision, now: float) -> None:
        """``decision`` was made at monotonic time ``now``: to wait, or to go on."""
        waits = current is not None and current.state is RoundState.BROKEN and decision.round is None
        wait = (current.number, decision.reason) if waits and current is not None else None
        if wait != self._wait:
            self._wait, self._since, self._said = wait, now, False
        if wait is not None and not self._said and now - self._since >= WORTH_SAYING_S:
            self._said = True
            logger().info("round.delayed", after=wait[0], reason=wait[1])
