"""The result of one check: a value, its judgment, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

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


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(size: float) -> str:
    """A number of bytes in powers of 1024."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{amount(size)} {unit}"
