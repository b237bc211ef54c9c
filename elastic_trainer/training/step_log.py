"""``steps.jsonl``: what a run did: some losses, evaluations, changes of its ranks.

Unlike ``metrics.jsonl`` it is not part of the state: a run that falls back to a checkpoint writes its steps again, and
both tries stay. One JSON object a line, of a ``kind``:

- ``loss``: step, epoch, loss (null: not finite), lr and samples_per_s (null: not known), world_size, round, wall
- ``evaluation``: step, epoch, metrics, world_size, round, wall
- ``round``: a change of the ranks; step, world_size, round, reason, wall

*Runs in* rank 0, main thread, also when rank 0 moves to another node. *Owns* the file.
*Fails by* nothing: a log never ends a training run. Lines that the disk refuses are lost; the first is logged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from elastic_trainer.clock import SYSTEM
from elastic_trainer.telemetry import logs
from elastic_trainer.training.files import finite
from elastic_trainer.training.progress import ProgressMoment

FILE_NAME = "steps.jsonl"


class StepLog:
    """Appends to the file in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._refused = False
        self._whole = False
        """Whether the file is known to end with a whole line."""

    def loss(self, moment: ProgressMoment, loss: float, lr: float | None, samples_per_s: float | None) -> None:
        """The global mean loss of the step that was committed at ``moment``."""
        speed = None if samples_per_s is None else round(samples_per_s, 1)
        self._write("loss", moment, epoch=moment.epoch, loss=finite(loss), lr=lr, samples_per_s=speed)

    def evaluated(self, moment: ProgressMoment, metrics: Mapping[str, float]) -> None:
        values = {name: finite(value) for name, value in metrics.items()}
        self._write("evaluation", moment, epoch=moment.epoch, metrics=values)

    def round(self, moment: ProgressMoment, reason: str) -> None:
        """The ranks changed, because of ``reason``."""
        self._write("round", moment, reason=reason)

    def _write(self, kind: str, moment: ProgressMoment, **values: Any) -> None:
        where = {"world_size": moment.world_size, "round": moment.round, "wall": SYSTEM.wall()}
        self._append(json.dumps({"kind": kind, "step": moment.step, **values, **where}, allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        try:
            with self._path.open("a+b") as file:
                file.write((b"" if self._whole or _ends_whole(file) else b"\n") + text.encode())
        except OSError as error:
            if not self._refused:
                logs.logger().warning("steps.not_written", path=str(self._path), error=error.strerror or str(error))
            self._refused, self._whole = True, False
            return
        self._refused, self._whole = False, True


def _ends_whole(file: IO[bytes]) -> bool:
    """Whether a killed process, or a full disk, has left no half line at the end."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"
