"""The page about health lists every phase and metric, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import elastic_trainer
from elastic_trainer.model import Phase
from elastic_trainer.telemetry.families import FAMILIES

PAGE = (Path(elastic_trainer.__file__).parent / "docs" / "health.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under ``heading``."""
    part = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_metric_is_listed_as_it_is_exported() -> None:
    """In the order of the code: name, kind, labels, who exports it, and what it means."""
    told = [
        (cells[0].strip("`"), cells[1], tuple(re.findall(r"`(\w+)`", cells[2])), *cells[3:])
        for cells in rows("Metrics")
    ]
    assert told == [(each.full_name, str(each.kind), each.labels, str(each.source), each.text) for each in FAMILIES]


def test_every_phase_is_listed() -> None:
    told = rows("Phases")
    assert [cells[0].strip("`") for cells in told] == [str(phase) for phase in Phase]
    assert all(len(cells[1]) > 10 for cells in told)
