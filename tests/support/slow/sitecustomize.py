"""Makes disks slow: in processes that find this directory in PYTHONPATH, each fsync of a checkpoint's file or directory
takes as many seconds more as the file says that ``SLOW_FSYNC`` names, workers' and agents' alike. Each read of tensors
does so by ``SLOW_READ``, and leaves a file ``reading-PID`` beside that one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_fsync, _preadv = os.fsync, os.preadv
_slow_writes, _slow_reads = os.environ.get("SLOW_FSYNC"), os.environ.get("SLOW_READ")


def _wait(named: str) -> None:
    began = time.monotonic()
    while time.monotonic() < began + float(Path(named).read_text()):
        time.sleep(0.05)


def _process_id() -> int:
    """As the test sees it, which may be on another host (see worker/report.py)."""
    try:
        return int(os.readlink(os.path.join(os.environ["ELASTIC_TRAINER_LEDGER_DIR"], "proc", "self")))
    except (KeyError, OSError):
        return os.getpid()


def _slow_fsync(descriptor: int) -> None:
    if "/checkpoints/" in os.readlink(f"/proc/self/fd/{descriptor}") and _slow_writes is not None:
        _wait(_slow_writes)
    _fsync(descriptor)


def _slow_preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if "/checkpoints/" in path and "tensors" in path and _slow_reads is not None:
        Path(_slow_reads).with_name(f"reading-{_process_id()}").touch()
        _wait(_slow_reads)
    return _preadv(descriptor, buffers, offset, flags)


if _slow_writes is not None:
    os.fsync = _slow_fsync  # type: ignore[assignment]
if _slow_reads is not None:
    os.preadv = _slow_preadv
