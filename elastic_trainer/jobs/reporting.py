"""Everything that rank 0 reports about a run: progress on the terminal, ``steps.jsonl``, loggers.

``steps.jsonl`` says what a run did. Unlike ``metrics.jsonl`` it is not part of the state: a run that falls back to a
checkpoint writes its steps again, and both tries stay. One JSON object a line, of a ``kind``:

- ``loss``: step, epoch, loss (null: not finite), lr and samples_per_s (null: not known), world_size, round, wall
- ``evaluation``: step, epoch, metrics, world_size, round, wall
- ``round``: a change of the ranks; step, world_size, round, reason, wall

:class:`RunLog` reports the run of a script with a Session as a job reports its own::

    log = RunLog(session, "runs/a")
    log.loss(step.loss)                                     # whenever the script looks at it
    log.evaluated(session.evaluate(model, test, 250, hits))
    log.close()

*Runs in* every rank, main thread; only rank 0 reports, and rank 0 may move. *Owns* the bar and, while it shows,
standard error; the files, until ``close``.
*Fails by* ConfigError for a URL, and for a logger that is not known or not installed. Later by nothing: lines that the
disk refuses are lost, and the first is logged.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from elastic_trainer import Session
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import LoggingConfig
from elastic_trainer.jobs.files import STEPS_FILE, finite
from elastic_trainer.jobs.loggers import Loggers, Opening, check_loggers
from elastic_trainer.jobs.task import Exhibits
from elastic_trainer.telemetry import logs

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

    def show_evaluation(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
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

    def show_evaluation(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
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
        shown: dict[str, Any] = {"total": moment.steps, "completed": moment.step, "epoch": moment.epoch, "loss": loss}
        ranks = f"{moment.world_size} rank{'s' * (moment.world_size != 1)}, round {moment.round}"
        self._speed = f"{rate[0]:,.0f} samples/s · {ranks}"
        self._bar.below = self._speed + self._metrics
        if self._row is None:
            self._row = self._bar.add_task("", **shown)
            self._bar.start()
            logs.configure(sys.stderr)  # the bar has put itself in its place, so that log lines scroll by above
        else:
            self._bar.update(self._row, **shown)

    def show_evaluation(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
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


class StepLog:
    """Appends to the file in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STEPS_FILE
        self._refused = False
        self._whole = False
        """Whether the file is known to end with a whole line."""

    def loss(self, moment: ProgressMoment, loss: float, lr: float | None, samples_per_s: float | None) -> None:
        """The global mean loss of the step that was committed at ``moment``."""
        speed = None if samples_per_s is None else round(samples_per_s, 1)
        self._write("loss", moment, epoch=moment.epoch, loss=finite(loss), lr=lr, samples_per_s=speed)

    def write_evaluation(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
        values = {name: finite(value) for name, value in metrics.items()}
        self._write("evaluation", moment, epoch=moment.epoch, metrics=values)

    def round(self, moment: ProgressMoment, reason: str) -> None:
        """The ranks changed, because of ``reason``."""
        self._write("round", moment, reason=reason)

    def _write(self, kind: str, moment: ProgressMoment, **values: Any) -> None:
        where = {"world_size": moment.world_size, "round": moment.round, "wall": SYSTEM.wall()}
        text = json.dumps({"kind": kind, "step": moment.step, **values, **where}, allow_nan=False) + "\n"
        try:
            with self._path.open("a+b") as file:
                if not self._whole and file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read(1) == b"\n" else "\n" + text  # behind what a kill or full disk has left
                file.write(text.encode())
        except OSError as error:
            if not self._refused:
                logs.logger().warning("steps.not_written", path=str(self._path), error=error.strerror or str(error))
            self._refused, self._whole = True, False
            return
        self._refused, self._whole = False, True


class Reporter:
    """See the module."""

    def __init__(self, config: LoggingConfig, directory: Path, job: Mapping[str, Any] | None = None) -> None:
        self._config, self._directory, self._job = config, directory, job or {}
        self._leads = False
        self._round: int | None = None
        self._progress = TrainingProgress()
        self._log: StepLog | None = None
        self._loggers: Loggers | None = None
        self._rate = StepRate()

    @property
    def wants_exhibits(self) -> bool:
        return self._loggers is not None and self._loggers.any

    def lead(self, leads: bool, moment: ProgressMoment, reason: str) -> None:
        """Begin to report, or stop, as rank 0 moves; ``reason`` is that of the present round."""
        if leads and not self._leads:
            self.close()
            self._progress, self._rate = progress(self._config), StepRate()
            self._log = StepLog(self._directory)
            self._loggers = Loggers(self._config.names, Opening(self._directory, moment.step, self._job))
        elif self._leads and not leads:
            self.close()
        self._leads = leads
        if self._log is not None and moment.round != self._round:
            self._log.round(moment, reason)
        self._round = moment.round

    def counted(self, samples: int) -> bool:
        """One more committed step; whether it is time to show where the run stands."""
        self._rate.count(samples)
        return self._progress.due()

    def stands(self, moment: ProgressMoment, loss: float) -> None:
        self._progress.report(moment, loss, self._rate.read())

    def looked(self, moment: ProgressMoment, loss: float, lr: float | None) -> None:
        """The loss of the step at ``moment`` is known, about a step later."""
        if self._log is None:
            return
        samples_per_s = self._rate.read()[0] or None
        self._log.loss(moment, loss, lr, samples_per_s)
        if self._loggers is not None:
            values = {"loss": loss, "learning rate": lr, "samples per second": samples_per_s}
            where = {"world size": moment.world_size, "round": moment.round}
            self._loggers.scalars("train", {**values, **where}, moment.step)

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float], exhibits: Exhibits) -> None:
        self._progress.show_evaluation(moment, metrics)
        if self._log is not None:
            self._log.write_evaluation(moment, metrics)
        if self._loggers is not None:
            self._loggers.scalars("test", metrics, moment.step)
            self._loggers.exhibits(exhibits, moment.step)

    def close(self, *, finished: bool = False) -> None:
        """``finished``: the training has come to its end."""
        self._progress.close()
        if self._loggers is not None:
            self._loggers.close(finished)
        self._progress, self._log, self._loggers = TrainingProgress(), None, None


class RunLog:
    """See the module. Make it before or after ``session.wrap``, on all ranks; call its methods on all ranks or on 0."""

    def __init__(
        self,
        session: Session,
        directory: str | Path,
        *,
        tensorboard: bool = False,
        loggers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if "://" in str(directory):
            raise ConfigError(
                f"RunLog cannot write to {directory}", hint="give a directory; checkpoints may go to URLs"
            )
        logging = LoggingConfig(progress="none", tensorboard=tensorboard, loggers=tuple(loggers))
        check_loggers(logging.names)
        self._session, self._directory = session, Path(directory)
        self._reporter = Reporter(logging, self._directory, config)
        session.on_ranks_changed(self._lead)

    def loss(self, loss: float, lr: float | None = None) -> None:
        """The mean loss of the step that was committed last, such as ``step.loss``."""
        self._lead()
        self._reporter.looked(self._moment(), loss, lr)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """What an evaluation gave after the step that was committed last."""
        self._lead()
        self._reporter.evaluated(self._moment(), metrics, Exhibits())

    def close(self) -> None:
        """The training has come to its end: loggers write what waits, up to 30 s, and mark their run as finished."""
        self._reporter.close(finished=True)

    def _lead(self) -> None:
        if self._session.is_rank0:
            with contextlib.suppress(OSError):  # the first line that is refused is logged
                self._directory.mkdir(parents=True, exist_ok=True)
        self._reporter.lead(self._session.is_rank0, self._moment(), self._session.round_reason)

    def _moment(self) -> ProgressMoment:
        session = self._session
        where = session.cursor.epoch, session.world_size, session.round
        return ProgressMoment(session.step_number, 0, *where)
