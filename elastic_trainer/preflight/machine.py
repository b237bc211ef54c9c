"""Immediate checks of this machine: shared memory, processors, limits of the process."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from pathlib import Path

from elastic_trainer.preflight.finding import Finding, Status, size_text
from elastic_trainer.preflight.limits import FitLimits

SHARED_MEMORY = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHM_HINT = "docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def shared_memory(limits: FitLimits, place: Path = SHARED_MEMORY) -> Finding:
    """Whether shared memory is usable, and its free space."""
    name = "shm"
    if not place.exists() and platform.system() != "Linux":
        return Finding(name, Status.SKIPPED, f"there is no {place} on {platform.system()}")
    try:
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=place) as file:
            os.posix_fallocate(file.fileno(), 0, limits.shm_least_bytes)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        return Finding(name, Status.BAD, f"{place} cannot be used: {said}", hint=_SHM_HINT)
    found = Finding(name, Status.OK, f"{place}: {size_text(free)} free", float(free), "B", float(limits.shm_bytes))
    return found.but(Status.WARN, _SHM_HINT) if free < limits.shm_bytes else found


def open_files(limits: FitLimits) -> Finding:
    """The limit of open files and sockets of a process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    text = "no limit" if unlimited else f"{soft} at a time"
    enough = unlimited or soft >= limits.open_files
    return Finding(
        "open_files",
        Status.OK if enough else Status.WARN,
        text,
        value=None if unlimited else float(soft),
        unit="files",
        limit=float(limits.open_files),
        hint="" if enough else f"raise it: ulimit -n {limits.open_files}",
    )


def usable_cores(quota: Path = CPU_QUOTA) -> float:
    """The cores that this process may use: those of its affinity, limited by the cgroup's quota."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        share, period = quota.read_text().split()
        return allowed if share == "max" else min(allowed, int(share) / int(period))
    except (OSError, ValueError):
        return allowed


def processors(workers: int, threads: int | None, quota: Path = CPU_QUOTA) -> Finding:
    """Whether ``workers`` processes of ``threads`` threads each have a core for each thread.

    ``threads`` None: OMP_NUM_THREADS is not set. Then torchrun sets it to 1 for several workers, while a single
    worker uses all visible cores.
    """
    cores = usable_cores(quota)
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = threads if threads is not None else (seen if workers == 1 else 1)
    wanted = each * workers
    text = f"{cores:.3g} cores for {workers} x {each} threads"
    if wanted > cores:
        hint = f"set OMP_NUM_THREADS to {max(1, int(cores // workers))}, or start fewer workers"
        return Finding("cpu", Status.WARN, text, float(wanted), "threads", cores, hint)
    return Finding("cpu", Status.OK, text, float(wanted), "threads", cores)
