"""Every benchmark still runs: at toy size, with a report of the published shape; a peer that is absent is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.recovery_torchft import TorchftJob, lighthouse_command, look, peers
from tests.bench.themes import Theme, themes
from tests.integration.training.launch import ran

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("theme", themes(), ids=lambda theme: str(theme.name))
def test_a_benchmark_runs_at_toy_size_and_reports(theme: Theme) -> None:
    """It exits 0, and its last line is one JSON object with figures and with musts that carry a verdict."""
    done = ran(["-m", f"tests.bench.{theme.name}", "--quick", "--json"], ROOT, LIMIT_S)
    assert done.code == 0, done.err[-4000:]
    shape = json.loads(done.out.splitlines()[-1])
    assert set(shape) == {"benchmark", "machine", "versions", "command", "figures", "musts"}
    assert shape["benchmark"] == theme.name
    assert shape["figures"]
    assert set(shape["machine"]["calibration"]) == {"sum_us", "memcpy_us", "product_us", "scale"}
    assert all(set(must) == {"name", "value", "limit", "ok"} for must in shape["musts"])


def _environment(directory: Path, script: str) -> Path:
    """A python of an environment that answers every question with ``script``."""
    python = directory / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def test_torchft_is_skipped_where_nobody_names_its_environment() -> None:
    """The report says that it was not asked for."""
    assert look(None).as_json() == {"skipped": "not asked for: --torchft-python names no environment"}


def test_torchft_is_skipped_where_it_cannot_be_imported(tmp_path: Path) -> None:
    """The report gives the last line of python's own words; an environment that is none is no crash either."""
    python = _environment(tmp_path, "echo Traceback >&2; echo 'ImportError: no torchft' >&2; exit 1")
    assert look(python).as_json() == {"skipped": f"{python}: ImportError: no torchft"}
    assert "No such file" in look(tmp_path / "nothing").skipped


def test_torchft_is_measured_where_it_is_complete(tmp_path: Path) -> None:
    """Its versions are reported once its lighthouse lies beside python, and not before."""
    python = _environment(tmp_path, "echo a warning; echo 'torchft 1, torch 2'")
    assert look(python).as_json() == {"skipped": f"{python}: there is no torchft_lighthouse beside it"}
    (tmp_path / "torchft_lighthouse").touch()
    assert look(python).as_json() == {"versions": "torchft 1, torch 2"}


def test_torchft_runs_in_its_own_environment_with_its_column_s_options(tmp_path: Path) -> None:
    """Lighthouse and nodes are the named environment's; the defaults' column passes no option at all."""
    columns = peers(tmp_path / "python", quick=False)
    for column in columns.values():
        job = column.job(tmp_path)
        assert isinstance(job, TorchftJob)
        lighthouse = lighthouse_command(column, "127.0.0.1:1", 2)
        node = job.command("n0")
        assert lighthouse[0] == str(tmp_path / "torchft_lighthouse")
        assert node[0] == str(tmp_path / "python")
        options = [*lighthouse[3:], *node[node.index(f"http://{job.spec.endpoint}") + 1 :]]
        assert bool(options) == (column.name == "torchft_tuned")
    assert "--heartbeat_timeout_ms=200" in lighthouse_command(columns["torchft_tuned"], "127.0.0.1:1", 2)
    assert list(peers(tmp_path / "python", quick=True)) == ["torchft_tuned"]
