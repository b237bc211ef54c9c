"""The result of one check: a value, its judgment, and what to do about it; and the limits that checks compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from elastic_trainer.errors import ElasticTrainerError


class Status(StrEnum):
    """The judgment of a finding."""

    OK = "ok"
    WARN = "warn"
    """It may slow a job, or hurt it later."""
    BAD = "bad"
    """No job should run here."""
    SKIPPED = "skipped"
    """The check did not run; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``value`` was compared with ``limit``; both are in ``unit``."""

    name: str
    status: Status
    text: str
    value: float | None = None
    unit: str = ""
    limit: float | None = None
    hint: str = ""

    @classmethod
    def failed(cls, name: str, error: ElasticTrainerError) -> Finding:
        """The finding of the check ``name`` that failed with ``error``."""
        return cls(name, Status.BAD, error.message, hint=error.hint or "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def but(self, status: Status, hint: str, text: str | None = None) -> Finding:
        """The same value with another judgment."""
        return replace(self, status=status, hint=hint, text=self.text if text is None else text)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        return cls(**{**values, "status": Status(values["status"])})


def bad(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings because of which no job should run here."""
    return tuple(finding for finding in findings if finding.status is Status.BAD)


def sentence(findings: Iterable[Finding]) -> str:
    """All findings in one line."""
    return "; ".join(f"{finding.name}: {finding.text}" for finding in findings)


def amount(value: float) -> str:
    """Three digits, without an exponent where possible."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size_text(size: float) -> str:
    """A number of bytes in powers of 1024."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{amount(size)} {unit}"


# ---- limits

MIB: Final = 1 << 20
GIB: Final = 1 << 30
NODE_CHECKS_S: Final = 120.0
"""Longest time for the checks of a node that wants to join; the first import of torch is in it."""
PEERS_WAIT_S: Final = 10.0
"""Longest time that it waits for other nodes' results to compare with."""


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
