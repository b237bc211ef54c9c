"""Where a session's process is: its rank, its device, how far the job has come. Asks no other rank.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a session that is not open, or not this process's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.collectives import Collectives
from elastic_trainer.worker.process import Process
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.training import Training
from elastic_trainer.worker.steps.workplace import Workplace


class SessionStanding:
    """See the module."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.environment = environment
        self._position = Position()
        self._process: Process | None = None
        self._training: Training | None = None
        """None before the model is wrapped."""
        self._foreign = False
        """Whether this process was forked from the one that trains."""

    def _require_open(self) -> Process:
        """ConfigError unless this process has opened the session."""
        if self._foreign:
            raise ConfigError(
                "this process was forked from the one that trains, and has no part in its session",
                hint="use the session in the process that opened it",
            )
        if self._process is None:
            raise ConfigError("the session is not open", hint="use it as `with Session(...) as session:`")
        return self._process

    @property
    def _here(self) -> Workplace:
        return self._require_open().place

    @property
    def _all(self) -> Collectives:
        return Collectives(self._here, self._training)

    @property
    def _trained(self) -> Training:
        if self._training is None:
            self._require_open()
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        return self._training

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._here.present.control.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.environment.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._here.present.control.world_size

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that saves and reports."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._here.placement.device

    @property
    def round(self) -> int:
        """The generation of the state: grows each time the job resumes, and is at least the launcher's round."""
        return self._position.generation

    @property
    def round_reason(self) -> str:
        """Why the present round was formed ("node n2 was lost", say); empty where that is not known."""
        return self._here.present.group.formation.reason

    @property
    def step_number(self) -> int:
        """Committed steps."""
        return self._position.step

    @property
    def cursor(self) -> Cursor:
        """How far the job has come in the data."""
        return self._position.cursor

    @property
    def within_epochs(self) -> bool:
        """Whether the body of ``session.epochs()`` is running."""
        return self._here.feed.within_epochs

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """The metrics of the last state saved as best."""
        return dict(self._position.best)

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that this life of the job began from."""
        return self._training.origin.name if self._training is not None else None
