"""Where this node's output goes: its agent's lines and, unless torchrun redirects them, those of its workers.

Looks at this process's standard output. *Fails by* nothing: a terminal, a pipe and what is not known are empty.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.model import as_text


def log_place(hostname: str, environ: Mapping[str, str] = os.environ, output: int = 1) -> str:
    """``file:PATH``, ``journal:UNIT``, ``job:JOB/INDEX`` or ``pod:NAME`` of Kubernetes; else empty."""
    try:
        found = os.fstat(output)
        target = os.readlink(f"/proc/self/fd/{output}")
    except OSError:
        return ""
    if stat.S_ISREG(found.st_mode):
        return f"file:{as_text(target)}"
    if environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":
        return f"journal:{_unit(Path('/proc/self/cgroup'))}"
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    job, _, index = hostname.rpartition("-")
    return f"job:{job}/{index}" if environ.get("JOB_COMPLETION_INDEX") == index else f"pod:{hostname}"


def _unit(listed: Path) -> str:
    """The systemd unit of this process, by the name of its group."""
    try:
        paths = [Path(line.rpartition(":")[2]) for line in listed.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    units = (part for path in paths for part in reversed(path.parts) if part.endswith(".service"))
    return next(units, "")
