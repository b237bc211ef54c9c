"""How log lines reach a stream that several processes share."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
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


UNREAD = """
import sys, threading
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.inplace.agent_link import ChannelLink
logs.configure()
sys.stdin.read()
def end():
    logs.logger().info("round.entered")
    ChannelLink.__new__(ChannelLink)._end(7, "its agent is gone")
threading.Thread(target=end).start()
threading.Event().wait(60.0)
"""


def test_a_process_that_nobody_listens_to_can_still_end() -> None:
    """Slurm's step, a container's runtime or a shell that was killed leaves pipes that nobody reads: the thread that
    has to end its process does so with its code, where a failed write would have ended the thread alone."""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", UNREAD], stdin=subprocess.PIPE, stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    process.communicate(timeout=60)
    assert process.returncode == 7
