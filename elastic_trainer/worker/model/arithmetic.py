"""What determines the bits that one micro-batch computes here: equal bits need all of it to be equal.

On CPUs. On CUDA devices some kernels of torch are not deterministic in any case, unless the script asks for that
(torch.use_deterministic_algorithms).

*Runs in* the worker's main thread.
*Fails by* ConfigError on each rank that differs from rank 0 or from the checkpoint, naming the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control

FIELD = "arithmetic"
"""Its field in checkpoints, for ``allow_changed`` too."""

_TREE = "reduction='tree' promises equal bits"
_ADVICE = {
    "threads": "set OMP_NUM_THREADS to one value for all processes",
    "isa": "use hosts of one kind, or set ATEN_CPU_CAPABILITY to one value for all processes",
    "torch": "install the same version of torch everywhere",
    "device": "train on devices of one kind",
    "modes": "set torch's flags for arithmetic to the same values everywhere",
}


def arithmetic(device: torch.device) -> dict[str, str]:
    """How this process computes: torch's version, threads, instruction set and device."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    modes = []
    if device.type == "cuda":
        modes += ["tf32"] if torch.backends.cuda.matmul.allow_tf32 else []
        modes += ["benchmark"] if torch.backends.cudnn.benchmark else []
    modes += ["deterministic"] if torch.are_deterministic_algorithms_enabled() else []
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "device": kind,
        "modes": " ".join(modes),
    }


def check_ranks(control: Control, mine: Mapping[str, str], promise: str = _TREE) -> None:
    """Raise on ranks that compute differently from rank 0, and only there: the others can continue without them.

    ``promise`` says what needs equal bits.
    """
    first = json.loads(control.broadcast_bytes(json.dumps(dict(mine)).encode(), 0))
    _check(mine, first, "on rank 0", promise=promise)


def check_resumed(mine: Mapping[str, str], saved: object, allow_changed: Collection[str]) -> None:
    """Raise if the checkpoint was computed differently, unless that is allowed."""
    if isinstance(saved, Mapping) and FIELD not in allow_changed:
        _check(mine, saved, "when the checkpoint was saved", f", or say allow_changed=[{FIELD!r}]")


def _check(
    mine: Mapping[str, str], other: Mapping[str, object], where: str, more: str = "", promise: str = _TREE
) -> None:
    for name, value in mine.items():
        if name in other and other[name] != value:
            raise ConfigError(
                f"{promise}, but '{name}' is {value} here and {other[name]} {where}",
                hint=f"{_ADVICE[name]}{more}",
            )
