"""How a local run is shown: line by line, or redrawn in place."""

from __future__ import annotations

import io

from rich.console import Console

from elastic_trainer.drills.display import SETTLE_S, IncidentKind, Picture, PlainDisplay, ShownIncident, render


def test_lines_come_in_the_order_of_their_times() -> None:
    """Whichever source tells first: a line waits a moment for those of before, and none is lost at the end."""
    out, picture = io.StringIO(), Picture("r", 0.0)
    shown = PlainDisplay(Console(file=out, width=80))
    for now, t, text in ((1.0, 1.0, "round 1 trains"), (1.1, 0.9, "round 1 formed"), (9.0, 8.9, "done")):
        shown.update(picture, [ShownIncident(t, IncidentKind.ROUND, text)], now)
        assert (text in out.getvalue()) == (now - t >= SETTLE_S)
    shown.close()
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["round 1 formed", "round 1 trains", "done", "no step yet (no node)"]


def test_the_newest_lines_are_whole_on_a_terminal_of_80_columns() -> None:
    """Older ones go: a line that is cut, or one below the screen, may be the one that matters."""
    out, picture = io.StringIO(), Picture("local-1234abcd", 0.0)
    why = "its workers failed: worker 0 (rank 1) ended with exit code 1: ValueError: there are 1000 classes"
    picture.incidents = [ShownIncident(float(at), IncidentKind.ROUND, f"round {at} broken: {why}") for at in range(20)]
    console = Console(file=out, width=80, height=24, force_terminal=True, no_color=True)
    console.print(render(picture, 20.0, *console.size))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24
    assert " ".join(" ".join(lines).split()).endswith(f"round 19 broken: {why}")
