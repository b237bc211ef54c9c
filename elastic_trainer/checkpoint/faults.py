"""Why a checkpoint could not be read or a directory not written, sorted by the caller's next action."""

from __future__ import annotations

from elastic_trainer.errors import CheckpointError, StorageError


class DamagedError(CheckpointError):
    """The content is not what was committed: quarantine it and take the previous one."""


class GoneError(CheckpointError):
    """It was removed while it was read (by another process's retention): take the next one."""


class UnreadableError(CheckpointError):
    """It exists and may be good, but this process cannot read it now: keep it, report it, take the next one."""


class InUseError(StorageError):
    """Another job writes in this directory."""
