"""How fast this machine copies memory and multiplies matrices, on its processors and on each CUDA device.

*Runs in* a process of its own (``python -m``): a device that is ill hangs in the driver, and agents import no torch for
this. *Owns* two buffers of 128 MiB at a time, on each device in turn.
*Fails by* ending with a traceback: the parent tells what it was doing.

The best of several tries counts: other load on the machine only ever makes a try slower.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import elastic_trainer
from elastic_trainer.clock import SYSTEM
from elastic_trainer.preflight.finding import Finding, Status, amount
from elastic_trainer.preflight.telling import Teller

if TYPE_CHECKING:
    import torch

BUFFER_BYTES: Final = 128 << 20
CPU_SIZE: Final = 1024
CUDA_SIZE: Final = 8192
TRY_FOR_S: Final = 0.6
_MOST_TRIES = 100


def best_s(attempt: Callable[[], object], try_for_s: float = TRY_FOR_S) -> float:
    """Seconds of the quickest of the tries that fit into ``try_for_s``; the first warms up and counts if it is slow."""
    begun, times = SYSTEM.monotonic(), list[float]()
    while len(times) < _MOST_TRIES:
        before = SYSTEM.monotonic()
        attempt()
        now = SYSTEM.monotonic()
        times.append(now - before)
        if now - begun > try_for_s:
            break
    return max(1e-9, min(times))


def versions(teller: Teller) -> None:
    """What nodes of one job must agree on, as far as it is here."""
    import torch

    teller.version("elastic_trainer", elastic_trainer.__version__)
    teller.version("python", platform.python_version())
    teller.version("torch", str(torch.__version__))
    teller.version("cuda", str(torch.version.cuda or "none"))
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        teller.version("nccl", _nccl())


def _nccl() -> str:
    from torch.cuda import nccl

    found: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, found))


def processors(teller: Teller) -> None:
    """Memory and matrices of the CPU."""
    import torch

    cpu = torch.device("cpu")
    teller.doing("copying memory")
    teller.found(_copy("memory.cpu", cpu, lambda: None))
    teller.doing("multiplying matrices")
    teller.found(_multiply("matmul.cpu.fp32", cpu, CPU_SIZE, torch.float32, lambda: None))


def device(teller: Teller, index: int) -> None:
    """Memory and matrices of CUDA device ``index``."""
    import torch

    there = torch.device("cuda", index)
    name = torch.cuda.get_device_name(there)
    teller.doing(f"copying memory of cuda:{index} ({name})")
    teller.version(f"cuda{index}", name)

    def wait() -> None:
        torch.cuda.synchronize(there)

    teller.found(_copy(f"memory.cuda{index}", there, wait))
    for label, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        teller.doing(f"multiplying {label} matrices on cuda:{index} ({name})")
        teller.found(_multiply(f"matmul.cuda{index}.{label}", there, CUDA_SIZE, kind, wait))
    torch.cuda.empty_cache()


def _copy(name: str, where: torch.device, wait: Callable[[], None]) -> Finding:
    import torch

    source = torch.ones(BUFFER_BYTES, dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)

    def attempt() -> None:
        target.copy_(source)
        wait()

    rate = 2 * BUFFER_BYTES / best_s(attempt) / 1e9  # each byte is read and written
    return Finding(name, Status.OK, f"{amount(rate)} GB/s", rate, "GB/s")


def _multiply(name: str, where: torch.device, size: int, kind: torch.dtype, wait: Callable[[], None]) -> Finding:
    import torch

    left = torch.ones((size, size), dtype=kind, device=where)
    right = torch.ones_like(left)
    result = torch.empty_like(left)

    def attempt() -> None:
        torch.mm(left, right, out=result)
        wait()

    rate = 2 * size**3 / best_s(attempt) / 1e9
    found = Finding(name, Status.OK, f"{amount(rate)} GFLOP/s", rate, "GFLOP/s")
    if not bool((result == size).all()):
        return found.but(Status.BAD, "this device computes wrongly: replace it", "the results are wrong")
    return found


def main(arguments: Sequence[str]) -> int:
    """``LIMIT_S``."""
    teller = Teller(float(arguments[0]))
    teller.doing("importing torch")
    import torch

    versions(teller)
    processors(teller)
    for index in range(torch.cuda.device_count()):
        device(teller, index)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
