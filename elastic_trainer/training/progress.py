"""What a running job shows: a bar on a terminal, otherwise log lines at a bounded rate.

*Runs in* rank 0, main thread (the bar refreshes itself from a thread of rich). *Owns* the bar and, while it shows,
standard error. *Fails by* nothing: a report never ends a training run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry import logs
from elastic_trainer.training.config import LoggingConfig

_WINDOW_S = 10.0
_SHORTEST_S = 1e-3
"""Less than that is noise."""


@dataclass(frozen=True, slots=True)
class ProgressMoment:
    """Where a run stands after a committed step; ``epoch`` counts those that are complete."""

    step: int
    steps: int
    epoch: int
    world_size: int
    round: int


class StepRate:
    """Samples and steps per second over about the last ten seconds, so that a change of the world shows."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._marks: list[tuple[float, int, int]] = []
        self._samples = self._steps = 0

    def count(self, samples: int) -> None:
        """One more committed step on ``samples`` samples; time counts from the end of the first."""
        self._samples += samples
        self._steps += 1
        if not self._marks:
            self._marks.append((self._clock.monotonic(), self._samples, self._steps))

    def read(self) -> tuple[float, float]:
        """Samples and steps per second; zeros while too little was counted."""
        if not self._marks:
            return 0.0, 0.0
        now = self._clock.monotonic()
        then, samples, steps = self._marks[0]
        elapsed = now - then
        if elapsed < _SHORTEST_S:
            return 0.0, 0.0
        rates = (self._samples - samples) / elapsed, (self._steps - steps) / elapsed
        self._marks.append((now, self._samples, self._steps))
        while len(self._marks) > 1 and now - self._marks[1][0] >= _WINDOW_S:
            self._marks.pop(0)
        return rates


class TrainingProgress:
    """One way to show a run. This one shows nothing: for ranks other than 0, and on request."""

    def due(self) -> bool:
        """Whether a report would be shown now; called after each step, the report's costly loss is read only then."""
        return False

    def report(self, moment: ProgressMoment, loss: float, rate: tuple[float, float]) -> None:
        """Show where the run stands; ``rate``: samples and steps per second."""

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
        """Show the result of an evaluation."""

    def close(self) -> None:
        """Nothing more comes."""


class Lines(TrainingProgress):
    """Log lines, at most one per ``every_s`` seconds from the first step on; evaluations always."""

    def __init__(self, every_s: float, clock: Clock = SYSTEM) -> None:
        self._every_s, self._clock = every_s, clock
        self._next = math.inf  # before the first step there is no speed to show, and that step may last

    def due(self) -> bool:
        if self._next == math.inf:
            self._next = self._clock.monotonic() + self._every_s
        return self._clock.monotonic() >= self._next

    def report(self, moment: ProgressMoment, loss: float, rate: tuple[float, float]) -> None:
        self._next = self._clock.monotonic() + self._every_s
        samples_per_s, steps_per_s = rate
        logs.logger().info(
            "training.progressed",
            step=moment.step,
            steps=moment.steps,
            epoch=moment.epoch,
            loss=round(loss, 6),
            samples_per_s=round(samples_per_s, 1),
            world_size=moment.world_size,
            round=moment.round,
            eta_s=round((moment.steps - moment.step) / steps_per_s, 1) if steps_per_s else None,
        )

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
        values = {name: round(value, 6) for name, value in metrics.items()}
        logs.logger().info("training.evaluated", step=moment.step, epoch=moment.epoch, metrics=values)


class _TwoLines(Bar):
    """A bar with a text below it: together they are too wide for a terminal of 80 columns."""

    below = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text(self.below)


class Terminal(TrainingProgress):
    """A bar at the bottom of the terminal; log lines scroll by above it."""

    _EVERY_S = 0.1

    def __init__(self, console: Console) -> None:
        self._next = 0.0
        self._speed = self._metrics = ""
        self._bar = _TwoLines(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            console=console,
        )
        self._row: TaskID | None = None
        """The bar's line, from the first report on: before it there is nothing to show."""

    def due(self) -> bool:
        return SYSTEM.monotonic() >= self._next

    def report(self, moment: ProgressMoment, loss: float, rate: tuple[float, float]) -> None:
        self._next = SYSTEM.monotonic() + self._EVERY_S
        shown: dict[str, Any] = {
            "total": moment.steps,
            "completed": moment.step,
            "epoch": moment.epoch,
            "loss": loss,
        }
        ranks = f"{moment.world_size} rank{'s' * (moment.world_size != 1)}, round {moment.round}"
        self._speed = f"{rate[0]:,.0f} samples/s · {ranks}"
        self._bar.below = self._speed + self._metrics
        if self._row is None:
            self._row = self._bar.add_task("", **shown)
            self._bar.start()
            logs.configure(sys.stderr)  # the bar has put itself in its place, so that log lines scroll by above
        else:
            self._bar.update(self._row, **shown)

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
        self._metrics = " · test: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        if self._row is not None:
            self._bar.below = self._speed + self._metrics
            self._bar.update(self._row, completed=moment.step)

    def close(self) -> None:
        if self._row is not None:
            self._bar.stop()
            logs.configure()


def progress(config: LoggingConfig, stream: TextIO | None = None) -> TrainingProgress:
    """The way to show a run on ``stream`` (default: standard error)."""
    if config.progress == "none":
        return TrainingProgress()
    console = Console(file=stream if stream is not None else sys.stderr)
    bar = config.progress == "bar" or (config.progress == "auto" and console.is_terminal)
    return Terminal(console) if bar else Lines(config.every_s)
