"""Why one checkpoint could not be read, or a directory not written, sorted by the caller's next move."""

from __future__ import annotations

from elastic_trainer.errors import CheckpointError, StorageError


class DamagedError(CheckpointError):
    """The content is not what was committed: quarantine it and take the previous one."""


class GoneError(CheckpointError):
    """It was removed while being read (retention of another process): take the next one."""


class UnreadableError(CheckpointError):
    """It is there and may be good, but this process cannot read it now: leave it alone, report, take the next one."""


class InUseError(StorageError):
    """Another job writes in this directory."""
