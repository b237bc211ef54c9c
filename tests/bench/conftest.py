"""Benchmarks run as ``python -m tests.bench`` runs them, beside peers that know one loopback alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.networks import one_host


@pytest.fixture(autouse=True)
def loopback() -> Iterator[None]:
    with one_host():
        yield
