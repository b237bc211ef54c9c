"""Recorded samples as promtool writes them: ``0+30x9`` for a line, ``_x3`` for nothing, ``stale`` at an end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.support.rulescenes.job import Key


def series(key: Key) -> str:
    name, labels = key
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in labels) + "}"


def values(samples: Mapping[int, float | None]) -> str:
    """The samples (by number of the scrape; None: the series ends there) as a line of expressions."""
    pieces: list[str] = []
    run: list[float] = []
    last = -1
    for number in sorted(samples):
        if number > last + 1:
            pieces += [*_lines(run), f"_x{number - last - 1}"]
            run = []
        sample, last = samples[number], number
        if sample is None:
            pieces += [*_lines(run), "stale"]
            run = []
        else:
            run.append(sample)
    return " ".join([*pieces, *_lines(run)])


def _lines(run: list[float]) -> Iterable[str]:
    """``run`` cut into pieces of equal steps, the longest possible from the left."""
    start = 0
    while start < len(run):
        step = run[start + 1] - run[start] if start + 1 < len(run) else 0.0
        end = start + 1
        while end < len(run) and abs(run[end] - run[end - 1] - step) < 1e-9:
            end += 1
        if end - start == 1:
            yield _number(run[start])
        else:
            yield f"{_number(run[start])}{'-' if step < 0 else '+'}{_number(abs(step))}x{end - start - 1}"
        start = end


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")
