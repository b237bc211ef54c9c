"""Rounds that a test leads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.inplace.leading import Lead, leading


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Lead]:
    with leading(tmp_path) as lead:
        yield lead
