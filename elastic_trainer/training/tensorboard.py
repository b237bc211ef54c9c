"""TensorBoard: event files, whose writer has a thread of its own.

*Runs in* rank 0, main thread. *Owns* event files in ``tensorboard/`` of the run.
*Fails by* OSError where the files cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_trainer.training.loggers import Logger, Opening
from elastic_trainer.training.task import Exhibits

DIRECTORY = "tensorboard"


class TensorBoard(Logger):
    """Points behind ``opening.step`` that an earlier life of the run wrote are hidden."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(opening.directory / DIRECTORY), purge_step=opening.step + 1)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
        if group == "test":
            self._writer.flush()

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        for name, image in exhibits.images.items():
            self._writer.add_image(name, image, step)
        for name, text in exhibits.texts.items():
            self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
