"""Counts and durations as people read them: the same words in agents, monitor and commands. Pure."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Final

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


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter: ``830 ms``, ``8.3 s``, ``12 min 5 s``, ``2 h 14 min``."""
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
