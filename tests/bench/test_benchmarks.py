"""Every benchmark still runs: at toy size, with a report of the published shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.themes import Theme, themes

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("theme", themes(), ids=lambda theme: str(theme.name))
def test_a_benchmark_runs_at_toy_size_and_reports(theme: Theme) -> None:
    """It exits 0, and its last line is one JSON object with figures and with musts that carry a verdict."""
    call = [sys.executable, "-m", f"tests.bench.{theme.name}", "--quick", "--json"]
    ran = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    shape = json.loads(ran.stdout.splitlines()[-1])
    assert set(shape) == {"benchmark", "machine", "versions", "command", "figures", "musts"}
    assert shape["benchmark"] == theme.name
    assert shape["figures"]
    assert all(set(must) == {"name", "value", "limit", "ok"} for must in shape["musts"])
