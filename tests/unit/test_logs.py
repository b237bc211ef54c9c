"""How log lines reach a stream that several processes share."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

from elastic_trainer.telemetry import logs


class Writes(io.StringIO):
    """Remembers what each write was given."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[Writes]:
    writes = Writes()
    logs.configure(writes, json=True)
    yield writes
    logs.configure()


def test_a_line_and_its_end_are_one_write(stream: Writes) -> None:
    """The workers of a node share torchrun's stderr: a line in two writes was torn apart by another's."""
    logs.logger().info("round.entered", rank=0)
    logs.logger().info("round.entered", rank=1)
    assert [piece[-1] for piece in stream.pieces] == ["\n", "\n"]
    assert [json.loads(piece)["rank"] for piece in stream.pieces] == [0, 1]
