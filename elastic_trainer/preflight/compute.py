"""Measures memory copies and matrix products on this machine's CPU and on each CUDA device.

*Runs in* a separate process (``python -m``): a broken device hangs in the driver, and agents do not import torch.
*Owns* two buffers of 128 MiB at a time, on each device in turn.
*Fails by* exiting with a traceback; the parent reports the last activity.

The fastest of several tries counts: other load only makes a try slower.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import elastic_trainer
from elastic_trainer.clock import SYSTEM
from elastic_trainer.preflight.child import Messages
from elastic_trainer.preflight.judge import Finding, Status, amount

if TYPE_CHECKING:
    import torch

BUFFER_BYTES: Final = 128 << 20
CPU_SIZE: Final = 1024
CUDA_SIZE: Final = 8192
TRY_FOR_S: Final = 0.6
_MOST_TRIES = 100


def best_s(attempt: Callable[[], object], where: torch.device) -> float:
    """Seconds of the fastest try within ``TRY_FOR_S``; the first one warms up, and counts only if it is slow."""
    import torch

    begun, times = SYSTEM.monotonic(), list[float]()
    while len(times) < _MOST_TRIES:
        before = SYSTEM.monotonic()
        attempt()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        now = SYSTEM.monotonic()
        times.append(now - before)
        if now - begun > TRY_FOR_S:
            break
    return max(1e-9, min(times))


def versions(messages: Messages) -> None:
    """Report the versions that nodes of one job must agree on."""
    import torch

    from elastic_trainer import torch_internals

    messages.version("elastic_trainer", elastic_trainer.__version__)
    messages.version("python", platform.python_version())
    messages.version("torch", str(torch.__version__))
    messages.version("cuda", str(torch.version.cuda or "none"))
    lacking = torch_internals.lacking()
    found = "; ".join(lacking) or "it has all private parts that are used"
    messages.found(Finding("torch", Status.WARN if lacking else Status.OK, found))
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        messages.version("nccl", ".".join(map(str, nccl)))


def measure(messages: Messages, where: torch.device, label: str, suffix: str = "") -> None:
    """Measure memory and matrix products of the device ``where``; findings are named after ``label``."""
    import torch

    messages.doing(f"copying memory{suffix}")
    source = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)
    rate = 2 * BUFFER_BYTES / best_s(lambda: target.copy_(source), where) / 1e9  # each byte is read and written
    messages.found(Finding(f"memory.{label}", Status.OK, f"{amount(rate)} GB/s", rate, "GB/s"))
    for kind in ("fp32",) if where.type == "cpu" else ("bf16", "fp32"):
        messages.doing(f"multiplying matrices in {kind}{suffix}")
        size = CPU_SIZE if where.type == "cpu" else CUDA_SIZE
        left = torch.ones((size, size), dtype=torch.bfloat16 if kind == "bf16" else torch.float32, device=where)
        right, result = torch.ones_like(left), torch.empty_like(left)
        rate = 2 * size**3 / best_s(partial(torch.mm, left, right, out=result), where) / 1e9
        found = Finding(f"matmul.{label}.{kind}", Status.OK, f"{amount(rate)} GFLOP/s", rate, "GFLOP/s")
        if not bool((result == size).all()):
            found = found.but(Status.BAD, "this device computes wrong results: replace it", "the results are wrong")
        messages.found(found)


def main(arguments: Sequence[str]) -> int:
    """``LIMIT_S``."""
    messages = Messages(float(arguments[0]))
    messages.doing("importing torch")
    import torch

    versions(messages)
    measure(messages, torch.device("cpu"), "cpu")
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        messages.version(f"cuda{index}", name)
        measure(messages, torch.device("cuda", index), f"cuda{index}", f" on cuda:{index} ({name})")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
