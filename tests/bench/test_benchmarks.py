"""Every benchmark still runs: at toy size, with a report of the published shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.themes import Theme, themes
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
