"""What one reader sees as lines, and what has changed in it since the update before. Pure.

The server writes all words and rows; the browser puts the changed lines into the text that it has, and makes its
elements those of the text. So templates decide by their line breaks what an update carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

Edit = tuple[int, int, Sequence[str]]
"""A line number, how many lines are removed there, and what comes in their place."""


@dataclass(frozen=True, slots=True)
class Update:
    """``view`` is HTML; ``course`` has a JSON value in each line, of which the curves are drawn."""

    view: tuple[str, ...]
    course: tuple[str, ...] = ()
    store: Mapping[str, Any] | None = None
    """Whether the store answers, and how old what is shown is."""


NOTHING: Final = Update((), ())


def message(now: Update, before: Update = NOTHING) -> bytes:
    """The JSON that makes ``before`` to ``now``."""
    found: dict[str, Any] = {"view": edits(before.view, now.view), "course": edits(before.course, now.course)}
    if before is NOTHING:
        found["full"] = True
    return json.dumps({**found, "store": now.store}, ensure_ascii=False, separators=(",", ":")).encode()


def edits(before: Sequence[str], now: Sequence[str]) -> list[Edit]:
    """From the last line to the first, so that the numbers of those that follow still hold."""
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
