"""Numbers, durations and sizes as people read them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from elastic_trainer import wording

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """``3.1 ms``, ``8.3 s``, ``12 min``, ``2 h 14 min``."""
    return UNKNOWN if seconds is None else wording.duration(seconds)


def number(value: float | None, unit: str = "") -> str:
    """Few digits: ``0.0213``, ``12.3``, ``4567``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return UNKNOWN
    text = f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def percent(share: float | None) -> str:
    """``97.5 %``."""
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def moment(wall: float) -> str:
    """A Unix time in UTC; what is no time that a calendar has is not known."""
    try:
        return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def ranges(numbers: Iterable[int]) -> str:
    """``0-7,9``."""
    parts: list[list[int]] = []
    for each in sorted(set(numbers)):
        if parts and each == parts[-1][1] + 1:
            parts[-1][1] = each
        else:
            parts.append([each, each])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def named(names: Iterable[str], most: int = 6) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
