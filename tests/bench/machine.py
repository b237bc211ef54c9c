"""What a benchmark's numbers were measured on: the machine and the versions of all that takes part."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support.requirements import find

DISTRIBUTIONS = ("elastic-trainer", "torch", "numpy", "etcd3", "grpcio", "protobuf", "safetensors", "xxhash")

STEADY = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""Environment in which loops are compared: glibc gives memory back to the system in some processes at each step and in
others never, by how their heap happens to lie. That is 12 % of a step of 60 ms, and says nothing about the loops."""


def machine() -> dict[str, object]:
    """Processor, cores (all, and those open to this process), memory in GiB, system, load, GPUs if torch sees any."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1m": round(os.getloadavg()[0], 2),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of the distributions that matter here and are installed, and of etcd."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    etcd = _etcd()
    return found | ({"etcd": etcd} if etcd else {})


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # a benchmark that never loaded torch used no GPU either
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _etcd() -> str | None:
    path = find("etcd")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return said.partition("\n")[0].removeprefix("etcd Version:").strip()
