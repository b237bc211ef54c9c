"""The limits of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Times in seconds, sizes in bytes. Only limits marked Bad make a node unfit; the others give warnings."""

    ratio: float = 0.5
    """Bad: computes or copies at less than this fraction of the other nodes' median; also for a pair of nodes."""
    peers: int = 2
    """Minimum number of other nodes for a median."""
    disk_bytes: int = 0
    """Bad: less free space for checkpoints. 0: the needed space is unknown."""
    disk_doubtful_bytes: int = GIB
    """Less gives a warning if the needed space is unknown."""
    disk_speed: float = 50e6
    """Bytes per second, written or read."""
    shm_bytes: int = GIB
    """Container engines provide 64 MiB, which data workers and NCCL soon fill."""
    shm_least_bytes: int = MIB
    """Bad: not even this amount can be written."""
    open_files: int = 4096
    etcd_round_trip_s: float = 0.1
    etcd_version: tuple[int, int] = (3, 4)
    clock_s: float = 1.0
