"""Makes disks slow: in processes that find this directory in PYTHONPATH, each fsync of a checkpoint's file or directory
takes as many seconds more as the file says that ``SLOW_FSYNC`` names, workers' and agents' alike."""

from __future__ import annotations

import os
import time
from pathlib import Path

_fsync, _named = os.fsync, os.environ.get("SLOW_FSYNC")


def _slow_fsync(descriptor: int) -> None:
    if "/checkpoints/" in os.readlink(f"/proc/self/fd/{descriptor}") and _named is not None:
        began = time.monotonic()
        while time.monotonic() < began + float(Path(_named).read_text()):
            time.sleep(0.05)
    _fsync(descriptor)


if _named is not None:
    os.fsync = _slow_fsync  # type: ignore[assignment]
