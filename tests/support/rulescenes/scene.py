"""A scene: a job to which something happens, and the alerts that must fire: all that are named, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.rulescenes.job import TICK_S, PlayedJob

Act = Callable[[PlayedJob, float], None]
"""Called before each scrape with the job and the time in minutes."""


@dataclass(frozen=True)
class Scene:
    """See the module."""

    name: str
    says: str
    """The behaviour that it proves."""
    minutes: float
    act: Act
    begin: Callable[[], PlayedJob] = PlayedJob
    fires: tuple[tuple[str, str, str], ...] = ()
    """Name, severity and run (or nothing) of all alerts that fire at any time."""
    not_before: float = 0.0
    """Until this minute none fires."""

    def play(self) -> PlayedJob:
        """The job, with all samples recorded."""
        job = self.begin()
        for number in range(int(self.minutes * 60 / TICK_S) + 1):
            self.act(job, number * TICK_S / 60)
            job.tick()
        return job
