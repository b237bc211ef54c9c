"""Weights & Biases: one run through rounds, restarts and lives, online or offline.

Project, entity, name, mode and so on are those of W&B's own variables (``WANDB_PROJECT``, ``WANDB_MODE=offline``, ...).

*Runs in* rank 0, in a thread. *Owns* ``wandb/`` in the run's directory.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Mapping
from typing import Any

import psutil
import wandb

from elastic_trainer.training.loggers import Logger, Opening, TrackedRun
from elastic_trainer.training.task import Exhibits

NAME = "wandb"


def open_logger(opening: Opening) -> Logger:
    """Begin or go on with the run in ``opening.directory``."""
    return WandbLogger(opening)


class WandbLogger:
    """Steps are kept in ``train/step`` and ``test/step``: W&B's own counter belongs to a process."""

    def __init__(self, opening: Opening) -> None:
        self._tracked = TrackedRun(opening.directory, NAME)
        if self._tracked.id is None:
            self._tracked.begin(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex)
        settings = wandb.Settings(console="off", silent=True)
        wandb.setup(settings)
        atexit.register(_end_service)  # before W&B's own hook, which waits 90 s for a server that is not there
        self._run: Any = wandb.init(
            id=self._tracked.id,
            resume="allow",
            dir=str(opening.directory),
            config=dict(opening.config),
            settings=settings,
        )
        for group in ("train", "test"):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self._tracked.advance(group, step):
            self._run.log({f"{group}/step": step, **{f"{group}/{name}": value for name, value in values.items()}})

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        if not self._tracked.advance("exhibits", step):
            return
        images = {name: wandb.Image(each.permute(1, 2, 0).numpy()) for name, each in exhibits.images.items()}
        texts = {name: wandb.Html(text, inject=False) for name, text in exhibits.texts.items()}
        self._run.log({"test/step": step, **images, **texts})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        atexit.unregister(_end_service)


def _end_service() -> None:
    """At the exit of a process whose run W&B has not finished in time: ``wandb sync`` sends what is on the disk."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb-core"):
            child.kill()
