"""Everything that rank 0 reports about a run: progress on the terminal, ``steps.jsonl``, loggers.

*Runs in* every rank, main thread; only rank 0 reports, and rank 0 may move.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.training.config import LoggingConfig
from elastic_trainer.training.loggers import Loggers, Opening
from elastic_trainer.training.progress import ProgressMoment, StepRate, TrainingProgress, progress
from elastic_trainer.training.step_log import StepLog
from elastic_trainer.training.task import Exhibits


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

    def counted(self, samples: int) -> None:
        self._rate.count(samples)

    @property
    def due(self) -> bool:
        """Whether it is time to show where the run stands."""
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
        self._progress.evaluated(moment, metrics)
        if self._log is not None:
            self._log.evaluated(moment, metrics)
        if self._loggers is not None:
            self._loggers.scalars("test", metrics, moment.step)
            self._loggers.exhibits(exhibits, moment.step)

    def close(self, *, finished: bool = False) -> None:
        """``finished``: the training has come to its end."""
        self._progress.close()
        if self._loggers is not None:
            self._loggers.close(finished)
        self._progress, self._log, self._loggers = TrainingProgress(), None, None
