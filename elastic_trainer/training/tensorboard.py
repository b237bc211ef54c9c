"""TensorBoard: scalars at the steps that are looked at, metrics and exhibits after each evaluation.

*Runs in* rank 0, main thread (the writer has a thread of its own). *Owns* event files in ``tensorboard/`` of the run.
*Fails by* ConfigError where the extra is not installed; that the files cannot be written is said once, no more: a log
is never worth a training run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry import logs
from elastic_trainer.training.progress import ProgressMoment
from elastic_trainer.training.task import Exhibits

DIRECTORY = "tensorboard"


def check_installed() -> None:
    """ConfigError unless TensorBoard can be written."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "logging.tensorboard is true, but the package tensorboard is not installed",
            hint="pip install 'elastic-trainer[tensorboard]', or leave it out",
        )


class TensorBoard:
    """Event files in ``directory``. Points behind ``step`` that an earlier life of the run wrote are hidden."""

    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = directory / DIRECTORY
        self._writer: Any = None
        with self._unless_refused():
            self._writer = SummaryWriter(str(self._path), purge_step=step + 1)

    def loss(self, moment: ProgressMoment, loss: float, lr: float | None, samples_per_s: float | None) -> None:
        """The global mean loss of the step that was committed at ``moment``."""
        values = {"loss": loss, "learning rate": lr, "samples per second": samples_per_s}
        with self._unless_refused():
            self._scalars("train", {**values, "world size": moment.world_size, "round": moment.round}, moment.step)

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float], exhibits: Exhibits) -> None:
        with self._unless_refused():
            self._scalars("test", metrics, moment.step)
            if self._writer is None:
                return
            for name, image in exhibits.images.items():
                self._writer.add_image(name, image, moment.step)
            for name, text in exhibits.texts.items():
                self._writer.add_text(name, text, moment.step)
            self._writer.flush()

    def close(self) -> None:
        with self._unless_refused():
            if self._writer is not None:
                self._writer.close()

    def _scalars(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        """Give up at the first error, which the writer's thread may have met earlier, and raises forever."""
        try:
            yield
        except OSError as error:
            self._writer = None
            logs.logger().warning("board.unwritten", path=str(self._path), error=error.strerror or str(error))
