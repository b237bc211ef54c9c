"""Why a broken round has no successor yet: logs each reason once, when it has lasted for a second. Pure."""

from __future__ import annotations

from typing import Final

from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.effects import LogDelay
from elastic_trainer.membership.rules import Decision

MIN_DELAY_S: Final = 1.0


class Delays:
    """See the module."""

    def __init__(self) -> None:
        self._wait: tuple[int, str] | None = None
        self._since = 0.0
        self._logged = False

    def note(self, current: RoundDocument | None, decision: Decision, now: float) -> LogDelay | None:
        """Take in ``decision``, made at monotonic time ``now``; returns what to log, if anything."""
        waits = current is not None and current.state is RoundState.BROKEN and decision.round is None
        wait = (current.number, decision.reason) if waits and current is not None else None
        if wait != self._wait:
            self._wait, self._since, self._logged = wait, now, False
        if wait is None or self._logged or now - self._since < MIN_DELAY_S:
            return None
        self._logged = True
        return LogDelay(*wait)
