"""A disk on which each fsync of a checkpoint takes as long as a test says, as of slow/sitecustomize."""

from __future__ import annotations

import os
from pathlib import Path

SLOW = Path(__file__).with_name("slow")
"""For PYTHONPATH."""


class SlowStorage:
    """Controlled by the file that ``SLOW_FSYNC`` has to name; the checkpoints lie in ``checkpoints``."""

    def __init__(self, directory: Path, checkpoints: Path) -> None:
        self.file, self._checkpoints = directory / "fsync", checkpoints
        self.takes(0.0)

    def takes(self, seconds: float) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(str(seconds))
        os.replace(new, self.file)

    def writing(self) -> set[str]:
        """The temporary directories: saves under way, and what is left of them."""
        return {path.name for path in self._checkpoints.glob("tmp-*")}
