"""``steps.jsonl``: what a run did, as it went: losses of steps that were looked at, evaluations, changes of its ranks.

Unlike ``metrics.jsonl`` it is no part of the state: a run that falls back to a checkpoint writes its steps again, and
both tries stay. One JSON object a line, told apart by ``kind``:

- ``loss``: step, epoch, loss (null: not finite), lr, samples_per_s, world_size, round, wall
- ``evaluation``: step, epoch, metrics, world_size, round, wall
- ``round``: a change of the ranks; step, world_size, round, reason, wall

*Runs in* rank 0, main thread, also when rank 0 moves to another node. *Owns* the file.
*Fails by* nothing: a log is never worth a training run; that it cannot be written is said once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry import logs
from elastic_trainer.training.progress import Moment

FILE_NAME = "steps.jsonl"


class StepLog:
    """Appends to the file in ``directory``."""

    def __init__(self, directory: Path, clock: Clock = SYSTEM) -> None:
        self._path, self._clock = directory / FILE_NAME, clock
        self._usable = True
        self._mend()

    def loss(self, moment: Moment, loss: float, lr: float, samples_per_s: float) -> None:
        """The global mean loss of the step that was committed at ``moment``."""
        self._write(
            "loss", moment, epoch=moment.epoch, loss=_finite(loss), lr=lr, samples_per_s=round(samples_per_s, 1)
        )

    def evaluated(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        """The result of an evaluation."""
        values = {name: _finite(value) for name, value in metrics.items()}
        self._write("evaluation", moment, epoch=moment.epoch, metrics=values)

    def round(self, moment: Moment, reason: str) -> None:
        """From this moment on the ranks are others, because of ``reason``."""
        self._write("round", moment, reason=reason)

    def _write(self, kind: str, moment: Moment, **values: Any) -> None:
        where = {"world_size": moment.world_size, "round": moment.round, "wall": self._clock.wall()}
        self._append(json.dumps({"kind": kind, "step": moment.step, **values, **where}, allow_nan=False) + "\n")

    def _mend(self) -> None:
        """End a line that a killed process has left half."""
        try:
            torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        except OSError as error:
            self._give_up(error)
            return
        if torn:
            self._append("\n")

    def _append(self, text: str) -> None:
        if not self._usable:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._usable = False
        logs.logger().warning("steps.unwritten", path=str(self._path), error=error.strerror or str(error))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
