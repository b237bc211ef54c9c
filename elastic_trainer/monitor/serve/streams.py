"""Snapshots of a run as server-sent events, for as long as somebody reads them.

*Runs in* the thread of the connection, which waits here between two pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor.serve.board import Board

STREAM_EVERY_S = 0.9
"""Between two snapshots of a stream: a poll of the store, less its jitter."""
STREAM_BYTES_PER_S = 1e6
"""Snapshots of thousands of ranks come more seldom: a megabyte is about 4,000."""
KEEP_ALIVE_S = 15.0
WAIT_STEP_S = 1.0
RETRY_MS = 2000


def snapshots(board: Board, run: str) -> Iterator[bytes]:
    """A snapshot when something of the run has changed, a comment when nothing has for a while."""
    reading, sent, sent_at, due_at = board.reading, None, SYSTEM.monotonic(), -math.inf
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not board.closed and run in reading.runs:
        now, mark = SYSTEM.monotonic(), (reading.runs[run].documents.serial, reading.store.connected)
        if mark != sent and now >= due_at and (body := board.run_body(run)) is not None:
            yield b"data: " + body.plain + b"\n\n"
            sent, sent_at = mark, now
            due_at = now + max(STREAM_EVERY_S, len(body.plain) / STREAM_BYTES_PER_S)
        elif now - sent_at >= KEEP_ALIVE_S:
            yield b": nothing new\n\n"
            sent_at = now
        wait_s = WAIT_STEP_S if mark == sent else min(WAIT_STEP_S, max(0.0, due_at - now))
        reading = board.wait(reading.serial, wait_s)
