"""What is still good enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Times in seconds, sizes in bytes. Only what is said to be bad makes a node unfit; else it is a warning."""

    ratio: float = 0.5
    """Bad: computes or copies at less than this part of the other nodes' median. A pair of nodes likewise."""
    peers: int = 2
    """Least number of other nodes for a median."""
    disk_bytes: int = 0
    """Bad: less is free where checkpoints go. 0: not known how much is needed."""
    disk_doubtful_bytes: int = GIB
    """Less is a warning, if it is not known how much is needed."""
    disk_speed: float = 50e6
    """Bytes a second, written or read."""
    shm_bytes: int = GIB
    """Container engines give 64 MiB, which data workers and NCCL soon fill."""
    shm_least_bytes: int = MIB
    """Bad: not even this can be written."""
    open_files: int = 4096
    etcd_round_trip_s: float = 0.1
    etcd_version: tuple[int, int] = (3, 4)
    clock_s: float = 1.0
