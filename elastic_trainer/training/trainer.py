"""The training loop: read it in a sitting.

*Runs in* each worker process, main thread. *Owns* the files beside the checkpoints: ``config.yaml``, ``metrics.jsonl``.
*Fails by* ConfigError and DataError before the ranks meet, StorageError, and whatever the task raises.
*Invariant*: what follows a checkpoint depends on the checkpoint, the configuration and the data alone, so a run that
was interrupted ends like one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elastic_trainer.clock import SYSTEM
from elastic_trainer.data.sampler import Batch, checked_length
from elastic_trainer.settings import worker_environment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.training.config import JobConfig
from elastic_trainer.training.evaluation import check_metric, evaluate, measurable
from elastic_trainer.training.files import make_writable, write_atomically
from elastic_trainer.training.history import History, Record
from elastic_trainer.training.loading import as_yaml
from elastic_trainer.training.precision import arithmetic
from elastic_trainer.training.progress import Moment, Progress, progress
from elastic_trainer.training.schedule import epochs_done, evaluation_due, run_length
from elastic_trainer.training.task import Task
from elastic_trainer.worker.device import Hardware, choose
from elastic_trainer.worker.session import Session

CONFIG_FILE = "config.yaml"


class Trainer:
    """Runs one job: ``Trainer(MyTask, config).run()``.

    Whatever is wrong with the configuration, the data or the output directory is raised by the constructor, before
    this process waits for any other.
    """

    def __init__(self, task: type[Task], config: JobConfig) -> None:
        environment = worker_environment()
        self.task = task(config)
        self.config = self.task.config
        self.directory = self.config.checkpoint.directory
        placement = choose(config.device, environment.local_rank, environment.world_size, Hardware.present())
        self._arithmetic = arithmetic(config.precision, placement.device)
        self._data = self.task.datasets()
        checked_length(self._data.test)
        self.length = run_length(config, checked_length(self._data.train))
        torch.manual_seed(config.seed)
        self._model = self.task.model()
        self._optimizer = self.task.optimizer(self._model)
        self._scheduler = self.task.scheduler(self._optimizer, self.length)
        if config.checkpoint.metric is not None:
            check_metric(config.checkpoint.metric, measurable(self.task, self._model, self._data.test))
        if environment.rank == 0:
            make_writable(self.directory)
        self.history = History()

    def run(self) -> dict[str, Any]:
        """Train to the end, from the newest checkpoint if there is one; returns what came of it."""
        began = SYSTEM.monotonic()
        with self._session() as session:
            session.register("history", self.history)
            model = session.wrap(
                self._model,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                scaler=self._arithmetic.scaler(),
                sync_batchnorm=self.config.sync_batchnorm,
            )
            with Run(self, session, model) as run:
                run.train()
            return run.report(SYSTEM.monotonic() - began)

    def _session(self) -> Session:
        checkpoint = self.config.checkpoint
        return Session(
            checkpoint_dir=self.directory,
            seed=self.config.seed,
            device=self.config.device,
            checkpoint_every_steps=checkpoint.every_steps,
            checkpoint_every_s=checkpoint.every_s,
            keep_last=checkpoint.keep_last,
            keep_every=checkpoint.keep_every,
        )


class Run:
    """The part of a job that happens inside its session."""

    def _train(self) -> None:
        self._evaluate_if_due()  # a checkpoint may lie between a step and its evaluation
        for batch in self._batches():
            with self._session.step() as step:
                for micro_batch in step.micro_batches(batch):
                    with self._arithmetic.autocast():
                        loss = self.task.loss(self._wrapped, micro_batch)
                    step.backward(loss)
                if self.config.clip_norm is not None:
                    step.clip(self.config.clip_norm)
                self._optimizer.step()
            if step.committed:
                self._committed(batch, step)
                self._evaluate_if_due()
