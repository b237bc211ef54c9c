"""Small text files of a run, written so that a reader never sees half of one, and its history of evaluations.

The history is part of the run's state, and ``metrics.jsonl`` always agrees with it.

*Runs in* every rank, main thread; only rank 0 writes. *Fails by* StorageError. Imports no torch.
*Invariant*: after a crash a file holds its old or its new content. The records travel with the checkpoints, so a run
that falls back forgets what it measured after that checkpoint; the file's lines of those records go at the next write.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import BestMode
from elastic_trainer.errors import StorageError

STEPS_FILE = "steps.jsonl"


def finite(value: float | None) -> float | None:
    """``value``, or None if JSON cannot express it (NaN, infinity)."""
    return value if value is not None and math.isfinite(value) else None


def beside(path: Path) -> Path:
    """A name for what is to replace ``path``: hidden, in the same directory, that of no other process."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def storage_errors(path: Path, hint: str = "give a writable checkpoint.directory") -> Iterator[None]:
    """Translate the operating system's refusal to write ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}", hint=hint) from error


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by a file that holds ``text``, durably."""
    with storage_errors(path):
        temporary = beside(path)
        try:
            with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def make_writable(directory: Path) -> None:
    """Create ``directory`` where it is missing and prove that it can be written, before hours of work depend on it."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


HISTORY_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """One evaluation. ``train_loss`` is the mean over the samples trained on since the one before, None if none."""

    step: int
    epoch: int
    samples: int
    train_loss: float | None
    lr: float
    metrics: Mapping[str, float]


class History:
    """The records of a run so far, and the training loss that the next one will report. Equal on all ranks."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        """Oldest first."""
        self._loss_sum = 0.0
        self._loss_samples = 0
        self._awaited: Callable[[], None] | None = None
        self.saved_step: int | None = None
        """The last step that was to be saved as the best or as the end of the run."""
        self._missed: set[int] = set()
        """Such steps that the storage did not take."""
        self.concluded_step: int | None = None
        """After this step all ranks have met; a rank that gets this state does not wait for them again."""

    def await_loss(self, observe: Callable[[], None]) -> None:
        """``observe()`` adds the loss of a committed step: after the next step, when the sum over all ranks is there,
        or earlier if this state is saved, given to a peer or evaluated.
        """
        self.add_awaited()
        self._awaited = observe

    def add_awaited(self) -> None:
        """Add the awaited loss."""
        observe, self._awaited = self._awaited, None
        if observe is not None:
            observe()

    def observe(self, loss: float, samples: int) -> None:
        """Add a committed step on ``samples`` samples with the mean ``loss``."""
        self._loss_sum += loss * samples
        self._loss_samples += samples

    def add(self, step: int, epoch: int, samples: int, lr: float, metrics: Mapping[str, float]) -> Record:
        """Keep the metrics measured after ``step`` steps, ``samples`` samples into ``epoch``."""
        self.add_awaited()
        loss = self._loss_sum / self._loss_samples if self._loss_samples else None
        record = Record(step, epoch, samples, loss, lr, dict(metrics))
        self.records.append(record)
        self._loss_sum, self._loss_samples = 0.0, 0
        return record

    def at(self, step: int) -> Record | None:
        """The record of the state after ``step`` steps."""
        return next((record for record in reversed(self.records) if record.step == step), None)

    def saved_or_refused(self, step: int, *, saved: bool) -> None:
        """``step`` was to be saved, and was, or the storage refused it."""
        self.saved_step = step
        if not saved:
            self._missed.add(step)

    def best(self, metric: str, mode: BestMode, *, kept: bool = False) -> Record | None:
        """The record with the best value of ``metric``, the earliest of equals; a value that is not a number loses.

        ``kept``: of those that can still be had.
        """
        passed_over = self._missed if kept else ()
        measured = [each for each in self.records if not math.isnan(each.metrics.get(metric, math.nan))]
        known = [each for each in measured if each.step not in passed_over]
        sign = 1.0 if mode is BestMode.MAX else -1.0
        return max(known, key=lambda record: sign * record.metrics[metric], default=None)

    def state_dict(self) -> dict[str, Any]:
        self.add_awaited()
        records = [asdict(record) for record in self.records]
        sums = {"loss_sum": self._loss_sum, "loss_samples": self._loss_samples}
        steps = {"saved_step": self.saved_step, "concluded_step": self.concluded_step, "missed": sorted(self._missed)}
        return {"records": records, **sums, **steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._awaited = None  # of a step that may not have been made, by the state that comes
        self.records = [Record(**record) for record in state["records"]]
        self._loss_sum, self._loss_samples = float(state["loss_sum"]), int(state["loss_samples"])
        self.saved_step = state["saved_step"]
        self.concluded_step = state.get("concluded_step")  # not in checkpoints of before, like what follows
        self._missed = set(state.get("missed", ()))

    def write(self, directory: Path, notes: Mapping[str, Any]) -> None:
        """Bring the file in ``directory`` up to date; ``notes`` are added to new lines but not part of the state."""
        path = directory / HISTORY_FILE
        with storage_errors(path):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        kept: list[str] = []  # the first that agree with the records; a torn line never does
        for line, record in zip(lines, self.records, strict=False):
            if not line.endswith("\n") or _content(line) != json.loads(json.dumps(_shown(record))):
                break
            kept.append(line)
        missing = ({**_shown(record), **notes} for record in self.records[len(kept) :])
        new = "".join(json.dumps(line, allow_nan=False) + "\n" for line in missing)
        if len(kept) == len(lines):
            with storage_errors(path), path.open("a", encoding="utf-8") as file:
                file.write(new)
        else:
            write_atomically(path, "".join(kept) + new)


def _shown(record: Record) -> dict[str, Any]:
    """The record as JSON: NaN and infinity are null."""
    values = asdict(record)
    values["metrics"] = {name: finite(value) for name, value in record.metrics.items()}
    values["train_loss"] = finite(record.train_loss)
    return values


def _content(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return {name: values.get(name) for name in Record.__slots__} if isinstance(values, dict) else None
