"""Why a round that is broken has no successor yet: said once for each reason that lasts. Pure."""

from __future__ import annotations

from typing import Final

from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.effects import SayDelayed
from elastic_trainer.membership.rules import Decision

WORTH_SAYING_S: Final = 1.0


class Delays:
    """See the module."""

    def __init__(self) -> None:
        self._wait: tuple[int, str] | None = None
        self._since = 0.0
        self._said = False

    def note(self, current: RoundDocument | None, decision: Decision, now: float) -> SayDelayed | None:
        """``decision`` was made at monotonic time ``now``, to wait or to go on; what to log, if anything."""
        waits = current is not None and current.state is RoundState.BROKEN and decision.round is None
        wait = (current.number, decision.reason) if waits and current is not None else None
        if wait != self._wait:
            self._wait, self._since, self._said = wait, now, False
        if wait is None or self._said or now - self._since < WORTH_SAYING_S:
            return None
        self._said = True
        return SayDelayed(*wait)
