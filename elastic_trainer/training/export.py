"""The trained model alone, for those who use it elsewhere: parameters and buffers as one safetensors file.

``safetensors.torch.load_model(model, path)`` reads it back, tied parameters included.

*Runs in* rank 0, main thread. *Owns* the two files. *Fails by* nothing: the checkpoints hold the same, so that a file
could not be written is said, and the training goes on.
*Invariant*: a file is whole, and holds the model that its name says, at any moment after it first appeared.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from elastic_trainer.telemetry import logs

_REFUSALS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError)
"""Of the disk (safetensors has an error of its own for that), and of a state that the format cannot say: buffers that
share parts of their memory, and what get_extra_state() gives."""

FINAL_FILE = "final_state.safetensors"
BEST_FILE = "best_model.safetensors"


def export(module: nn.Module, path: Path, notes: Mapping[str, object]) -> bool:
    """Replace ``path`` by the state of ``module``, with ``notes`` as the file's metadata; whether that was possible."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        temporary = Path(name)
        try:
            save_model(module, name, {key: str(value) for key, value in notes.items()})
            _make_durable(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except _REFUSALS as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        logs.logger().warning("model.not_exported", path=str(path), error=reason)
        return False
    logs.logger().info("model.exported", path=str(path), **dict(notes))
    return True


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
