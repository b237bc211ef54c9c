"""Weights & Biases: one run through rounds, restarts and lives, online or offline.

Project, entity, name, mode and so on are those of W&B's own variables (``WANDB_PROJECT``, ``WANDB_MODE=offline``, ...).

*Runs in* rank 0, in a thread. *Owns* ``wandb/`` in the run's directory, and W&B's service, a process.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any

import psutil
import wandb

from elastic_trainer.clock import pause
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.training.loggers import LEAVE_S, Logger, Opening, TrackedRun
from elastic_trainer.training.task import Exhibits

NAME = "wandb"
EXIT_S = 2 * LEAVE_S
"""How long the exit of a process waits for W&B, which itself waits 90 s for a server that is not there."""
_AGAIN_S = 0.5


class WandbLogger(Logger):
    """Steps are kept in ``train/step`` and ``test/step``: W&B's own counter belongs to a process."""

    def __init__(self, opening: Opening) -> None:
        self._tracked = TrackedRun(opening.directory, NAME)
        if self._tracked.id is None:
            self._tracked.begin(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex)
        settings = wandb.Settings(console="off", silent=True)
        # A thread, as hooks run in an order that W&B decides. The main thread has ended before the first of them.
        threading.Thread(target=copy_context().run, args=(_limit_exit,), name="wandb-exit", daemon=True).start()
        wandb.setup(settings)
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


def _limit_exit() -> None:
    """End W&B's service when it keeps this process from its exit: what waits for the service then fails at once."""
    threading.main_thread().join()
    pause(EXIT_S)
    logger().warning(
        "logger.unfinished",
        logger=NAME,
        waited_s=EXIT_S,
        hint="W&B is ended; `wandb sync` sends what it has written to the disk",
    )
    while True:  # until the process has ended: the service may be starting just now
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
        pause(_AGAIN_S)
