"""Logs the run of a script with a Session as a job logs its own: to ``steps.jsonl`` and to loggers.

::

    log = RunLog(session, "runs/a")
    log.loss(step.loss)                                     # whenever the script looks at it
    log.evaluated(session.evaluate(model, test, 250, hits))
    log.close()

``elastic-trainer plot runs/a`` draws it, with each change of the ranks.

*Runs in* every rank, main thread; rank 0 writes, also when rank 0 moves. *Owns* the files, until ``close``.
*Fails by* ConfigError for a URL, and for a logger that is not known or not installed. What cannot be written is logged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.training.config import LoggingConfig
from elastic_trainer.training.loggers import check_loggers
from elastic_trainer.training.progress import ProgressMoment
from elastic_trainer.training.reporter import Reporter
from elastic_trainer.training.task import Exhibits
from elastic_trainer.worker.session import Session


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
