"""Whether there is too little memory for copies of the state; logs when that begins and ends."""

from __future__ import annotations

from elastic_trainer.checkpoint import NoRoomError
from elastic_trainer.clock import Clock
from elastic_trainer.telemetry.logs import logger

AGAIN_S = 60.0
"""Seconds after which copies that only stay in memory are tried again."""


class Scarcity:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen_s = clock, float("-inf")
        self._short = False

    @property
    def recent(self) -> bool:
        """Whether there was too little a moment ago."""
        return self._short and self._clock.monotonic() - self._seen_s < AGAIN_S

    def seen(self, error: NoRoomError) -> None:
        """A copy could not be made."""
        if not self._short:
            logger().warning("checkpoint.not_beside", reason=str(error), effect="training waits for each save")
        self._short, self._seen_s = True, self._clock.monotonic()

    def over(self) -> None:
        """A copy was made."""
        if self._short:
            logger().info("checkpoint.beside_again", effect="training no longer waits for saves")
        self._short = False
