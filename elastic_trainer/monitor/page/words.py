"""Formats numbers, durations and names for the status page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from math import isfinite
from typing import Any, Final

from elastic_trainer import wording
from elastic_trainer.wording import fixed, whole

NONE: Final = "\N{EN DASH}"
"""Stands for an unknown value."""
TIMES: Final = "\N{MULTIPLICATION SIGN}"

NAMES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = json.loads(
    files(__package__).joinpath("names.json").read_text(encoding="utf-8")
)
"""Words and looks of states, phases and causes."""


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return value


def text(value: Any) -> str:
    """``value`` as text; empty for null."""
    return "" if value is None else str(value)


def count(value: Any) -> str:
    """A whole number with commas: ``48,210``."""
    known = number(value)
    return NONE if known is None else f"{whole(known):,}"


def duration(value: Any) -> str:
    """Seconds in the two largest units that matter."""
    seconds = number(value)
    return NONE if seconds is None else wording.duration(seconds)


def lasting(value: Any) -> str:
    """The age of something that continues; below a minute in whole seconds, to avoid flicker at each update."""
    age = number(value)
    return duration(age) if age is None or age >= 59.5 else f"{whole(max(0.0, age))} s"


def ago(value: Any) -> str:
    """An age in words."""
    return NONE if number(value) is None else f"{lasting(value)} ago"


def measure(value: Any) -> str:
    """A loss, with about four significant digits."""
    known = number(value)
    if known is None:
        return NONE
    size = abs(known)
    if size >= 100000 or (size and size < 0.0001):
        return f"{known:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    return fixed(known, 1 if size >= 100 else 3 if size >= 1 else 4)


def percent(value: Any) -> str:
    """A share of 1: ``96.8 %``."""
    known = number(value)
    return NONE if known is None else f"{fixed(known * 100, 1)} %"


def times(value: Any) -> str:
    """A ratio: ``2.31`` and the sign of multiplication."""
    known = number(value)
    return NONE if known is None else f"{fixed(known, 2 if known < 10 else 0)}{TIMES}"


def size(value: Any) -> str:
    """Bytes in decimal units: ``1.2 GB``."""
    known = number(value)
    if known is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if known < 999.5:
            return f"{fixed(known, 0 if unit == 'B' or known >= 99.5 else 1)} {unit}"
        known /= 1000
    return f"{fixed(known, 1)} TB"


def listed(names: Sequence[str], most: int = 4) -> str:
    """``a, b, c, d and 12 more``."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def named(kind: str, value: Any) -> Mapping[str, str]:
    """Words and look of a state, phase or cause; an unknown one is shown by its own name."""
    key = text(value)
    known = NAMES[kind].get(key)
    if known is None:
        return {"key": "other", "label": key.replace("_", " ") or "not known", "look": "other", "mark": "?"}
    return {"key": key, **known}


def natural(name: str) -> str:
    """A key that sorts ``node-2`` before ``node-10``."""
    return re.sub(r"[0-9]+", lambda digits: digits.group().zfill(12), name)


def stamp(wall: Any) -> tuple[str, str]:
    """A Unix time for ``<time>``: machine-readable and human-readable form; both empty if it is not a time."""
    known = number(wall)
    try:
        when = datetime.fromtimestamp(known, UTC) if known is not None else None
    except (ValueError, OverflowError, OSError):
        when = None
    if when is None:
        return "", ""
    return when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%Y-%m-%d %H:%M:%S UTC")
