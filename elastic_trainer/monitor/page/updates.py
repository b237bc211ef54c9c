"""A page as lines, and the edits since the previous update. Pure.

The server writes all words and rows; the browser applies the changed lines to its text, and updates its elements to
match. So the line breaks of the templates decide what an update carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

Edit = tuple[int, int, Sequence[str]]
"""A line number, the number of lines removed there, and the lines that replace them."""


@dataclass(frozen=True, slots=True)
class Update:
    """``view`` is HTML; ``course`` has a JSON value in each line, from which the curves are drawn."""

    view: tuple[str, ...]
    course: tuple[str, ...] = ()
    store: Mapping[str, Any] | None = None
    """Whether the store answers, and the age of the data."""


NOTHING: Final = Update((), ())


def message(now: Update, before: Update = NOTHING) -> bytes:
    """The JSON that turns ``before`` into ``now``."""
    found: dict[str, Any] = {"view": edits(before.view, now.view), "course": edits(before.course, now.course)}
    if before is NOTHING:
        found["full"] = True
    return json.dumps({**found, "store": now.store}, ensure_ascii=False, separators=(",", ":")).encode()


def edits(before: Sequence[str], now: Sequence[str]) -> list[Edit]:
    """The edits from the last line to the first, so that the remaining line numbers stay valid."""
    same = _matching if len(before) == len(now) else _moved
    return [(start, end - start, now[low:high]) for start, end, low, high in same(before, now)][::-1]


def _matching(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    start = None
    for place, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new and start is None:
            start = place
        elif old == new and start is not None:
            yield start, place, start, place
            start = None
    if start is not None:
        yield start, len(now), start, len(now)


def _moved(before: Sequence[str], now: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    for tag, start, end, low, high in SequenceMatcher(None, before, now).get_opcodes():
        if tag != "equal":
            yield start, end, low, high
