"""Numbers, durations and sizes as people read them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """``3.1 ms``, ``0.25 s``, ``12 s``, ``3 min``, ``2.5 h``, ``3.0 d``."""
    if seconds is None:
        return UNKNOWN
    for limit, factor, unit, digits in (
        (0.1, 1000.0, "ms", 1),
        (10.0, 1.0, "s", 2),
        (120.0, 1.0, "s", 0),
        (7200.0, 1 / 60, "min", 0),
        (172800.0, 1 / 3600, "h", 1),
    ):
        if seconds < limit:
            return f"{seconds * factor:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} d"


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
