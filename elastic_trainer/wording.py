"""Counts, durations, numbers and times as people read them: the same in agents, monitor and commands. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final

_PLACES: Final = tuple(Decimal(1).scaleb(-digits) for digits in range(6))


def counted(number: int, one: str, many: str = "") -> str:
    """``1 step``, ``2 steps``, ``48,210 steps``; with ``many`` the plural is that: ``2 nodes are``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def fixed(value: float, digits: int) -> str:
    """With ``digits`` decimals, halves away from zero."""
    return str(Decimal(value).quantize(_PLACES[digits], ROUND_HALF_UP))


def whole(value: float) -> int:
    """The nearest integer, halves up."""
    return int((value + 0.5) // 1)


def duration(seconds: float | None) -> str:
    """Seconds in the two largest units that matter: ``830 ms``, ``8.3 s``, ``12 min 5 s``, ``2 h 14 min``."""
    if seconds is None:
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return _milliseconds(seconds * 1000)
    if seconds < 59.5:
        return f"{fixed(seconds, 1 if seconds < 9.95 else 0)} s"
    total = whole(seconds)
    if total < 3600:
        return _pair(total // 60, "min", total % 60 if total < 600 else 0, "s")
    if total < 86400:
        return _pair(total // 3600, "h", total % 3600 // 60, "min")
    return _pair(total // 86400, "d", total % 86400 // 3600, "h")


def _milliseconds(value: float) -> str:
    if value < 0.05:
        return "0 s"
    return f"{fixed(value, 1 if value < 9.95 else 0)} ms"


def _pair(large: int, unit: str, small: int, smaller: str) -> str:
    return f"{large} {unit} {small} {smaller}" if small else f"{large} {unit}"


UNKNOWN = "-"


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


def how_far(progress: Mapping[str, Any] | None) -> str:
    """How far a run is, of what is known: ``epoch 2 of 14, 10.7 %, 4 min left``. ``progress``: a ``RunProgress``."""
    if progress is None:
        return ""
    left, last = progress["left_s"], progress["last_step"]
    parts = [
        "paused by an operator" if progress["paused"] else "",
        f"epoch {progress['epoch'] + 1} of {progress['epochs']}" if progress["epochs"] else "",
        f"of {last:,}" if last else "",
        percent(progress["part"]) if progress["part"] is not None else "",
        f"{duration(left)} left" if left is not None and progress["part"] != 1.0 else "",
    ]
    return ", ".join(part for part in parts if part)


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
