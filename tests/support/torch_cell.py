"""A pytest plugin that ends with a row of the table of versions in docs/explanation/map.md (``make test-torch``).

``-p tests.support.torch_cell --cell='make test-torch ...'``
"""

from __future__ import annotations

import platform
from datetime import UTC, datetime

import pytest
import torch

from elastic_trainer.clock import SYSTEM
from tests.support.requirements import TORCH_CANNOT

COLUMNS = ("torch", "Python", "passed", "failed", "this torch cannot", "other skips", "seconds", "date", "command")
_began = SYSTEM.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cell", required=True, help="the command that runs this cell")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    cannot = sum(TORCH_CANNOT in reason for reason in skipped)
    passed, failed, broken = (len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error"))
    row = (
        str(torch.__version__).partition("+")[0],
        platform.python_version(),
        f"{passed:,}",
        f"{failed + broken:,}",
        f"{cannot:,}",
        f"{len(skipped) - cannot:,}",
        f"{SYSTEM.monotonic() - _began:,.0f}",
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"`{config.getoption('--cell')}`",
    )
    terminalreporter.section("for the table of versions in docs/explanation/map.md")
    terminalreporter.line(f"| {' | '.join(row)} |")
