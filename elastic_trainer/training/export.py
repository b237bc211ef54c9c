"""The trained model alone, for use elsewhere: parameters and buffers as one safetensors file.

``safetensors.torch.load_model(model, path)`` reads it back, tied parameters included.

*Runs in* rank 0, main thread. *Owns* the two files. *Fails by* nothing: a failed write is logged, since the checkpoints
hold the same.
*Invariant*: a file is whole, and holds the model that its name says, at any moment after it first appeared. A rank 0
that froze while it wrote, and was replaced since, does not overwrite a newer model with its older one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import nn

from elastic_trainer.checkpoint.storage.posix_io import beside
from elastic_trainer.telemetry import logs

_REFUSALS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError)
"""Of the disk (safetensors has an error of its own for that), and of a state that the format cannot say: buffers that
share parts of their memory, and what get_extra_state() gives."""

FINAL_FILE = "final_state.safetensors"
BEST_FILE = "best_model.safetensors"


def export(module: nn.Module, path: Path, step: int, notes: Mapping[str, object]) -> bool:
    """Replace ``path`` by the state of ``module`` after ``step`` steps; whether that was possible.

    ``step`` and ``notes`` are the file's metadata.
    """
    notes = {"step": step, **notes}
    before = _identity(path)
    try:
        temporary = beside(path)
        mode = temporary.stat().st_mode
        try:
            save_model(module, str(temporary), {key: str(value) for key, value in notes.items()})
            temporary.chmod(mode)
            _make_durable(temporary)
            if _identity(path) != before and (there := exported_step(path)) is not None and there >= step:
                logs.logger().warning("model.exported_by_another", path=str(path), step=step, there=there)
                return False
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except _REFUSALS as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        logs.logger().warning("model.not_exported", path=str(path), error=reason)
        return False
    logs.logger().info("model.exported", path=str(path), **dict(notes))
    return True


def exported_step(path: Path) -> int | None:
    """The step of the model in ``path``; None where there is none that can be read."""
    try:
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Another one after each replacement."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
