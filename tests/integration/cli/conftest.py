"""Commands that end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.cli.test_local import Local


@pytest.fixture
def started() -> Iterator[list[Local]]:
    commands: list[Local] = []
    yield commands
    for command in commands:
        command.kill()
