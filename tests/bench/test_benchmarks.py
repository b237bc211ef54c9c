"""Every benchmark still runs: at toy size, with a report of the published shape; and the page of them is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench.__main__ import Theme, themes
from tests.bench.page import BEGIN, END
from tests.integration.training.launch import ran

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("theme", themes(), ids=lambda theme: str(theme.name))
def test_a_benchmark_runs_at_toy_size_and_reports(theme: Theme) -> None:
    """It exits 0, and its last line is one JSON object with figures; no job of ours loses or repeats a sample."""
    done = ran(["-m", f"tests.bench.{theme.name}", "--quick", "--json"], ROOT, LIMIT_S)
    assert done.code == 0, done.err[-4000:]
    shape = json.loads(done.out.splitlines()[-1])
    assert set(shape) == {"benchmark", "machine", "versions", "command", "figures", "musts"}
    assert shape["figures"]
    assert [must for must in shape["musts"] if "samples lost" in must["name"] and not must["ok"]] == []


def test_a_report_is_written(tmp_path: Path) -> None:
    """The page with what was measured, and README's part of it; what there was no time for is named."""
    (tmp_path / "deploy/images").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"{BEGIN}\nold\n{END}\n", encoding="utf-8")
    words = ["report", "scale", "goodput_model", "--minutes", "2", "--directory", str(tmp_path)]
    done = ran(["-m", "tests.bench", *words], ROOT, LIMIT_S)
    assert done.code == 0, done.err[-4000:]
    page = (tmp_path / "deploy/report.md").read_text(encoding="utf-8")
    assert {"## Promises", "## Goodput by a model", "| torch | " + torch.__version__ + " |"} <= set(page.splitlines())
    assert "old" not in (tmp_path / "README.md").read_text(encoding="utf-8")
