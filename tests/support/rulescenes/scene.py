"""A scene: a run to which something happens, and the alerts that must fire: all that are named, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.rulescenes.job import TICK_S, PlayedJob

Act = Callable[[PlayedJob, float], None]
"""Called before each scrape with the job and the time in minutes."""


@dataclass(frozen=True)
class Fires:
    """One alert that fires. Without ``of_run`` it is about monitors or etcd and has no label ``run``."""

    alert: str
    severity: str
    of_run: bool = True


@dataclass(frozen=True)
class Scene:
    name: str
    """Also the name of the run."""
    says: str
    """The behaviour that it proves."""
    minutes: float
    act: Act
    fires: tuple[Fires, ...] = ()
    """All alerts that fire at any time."""
    not_before: float = 0.0
    """Until this minute none fires."""
    alone: bool = False
    """Whether no other run may be in the same Prometheus: its monitor would answer in the place of this one's."""
    lasts: tuple[float, ...] = ()
    """From which minute to which the first alert fires without a gap; it then ends, and does not fire again."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of PlayedJob."""

    def play(self) -> PlayedJob:
        job = PlayedJob(self.name, **self.job)
        for number in range(int(self.minutes * 60 / TICK_S) + 1):
            self.act(job, number * TICK_S / 60)
            job.tick()
        return job


def into(
    scenes: list[Scene],
    name: str,
    says: str,
    minutes: float,
    *fires: Fires,
    not_before: float = 0.0,
    alone: bool = False,
    lasts: tuple[float, ...] = (),
    **job: Any,
) -> Callable[[Act], Act]:
    """Decorates what happens in a scene, which is added to ``scenes``."""

    def add(act: Act) -> Act:
        scenes.append(Scene(name, says, minutes, act, fires, not_before, alone, lasts, job))
        return act

    return add
