"""A run as server-sent events while a client reads them: its snapshots, or the changes of its page.

*Runs in* the thread of the connection, which waits here between two pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from elastic_trainer.clock import SYSTEM
from elastic_trainer.monitor import page
from elastic_trainer.monitor.serve.board import Board

STREAM_EVERY_S = 0.9
"""Seconds between two events of a stream: a poll of the store, less its jitter."""
STREAM_BYTES_PER_S = 1e6
"""Snapshots of thousands of ranks are sent less often: a megabyte is about 4,000 ranks."""
KEEP_ALIVE_S = 15.0
AGES_EVERY_S = 5.0
"""Seconds after which a page is updated although only ages have changed; the page treats 10 s of silence as a dead
stream."""
WAIT_STEP_S = 1.0
RETRY_MS = 2000


def snapshots(board: Board, run: str) -> Iterator[bytes]:
    """A snapshot when the run has changed, a comment when it has not for a while."""

    def snapshot() -> bytes | None:
        body = board.run_body(run)
        return None if body is None else body.plain

    return _events(board, run, snapshot, lambda: b": nothing new\n\n", KEEP_ALIVE_S)


def updates(board: Board, run: str, choice: page.Choice) -> Iterator[bytes]:
    """The whole page, then its changes."""
    before = page.NOTHING

    def update() -> bytes | None:
        nonlocal before
        now = board.run_update(run, choice)
        if now is None:
            return None
        told = page.message(now, before)
        before = now
        return told

    return _events(board, run, update, lambda: _event(update()), AGES_EVERY_S)


def _events(
    board: Board, run: str, make: Callable[[], bytes | None], idle: Callable[[], bytes], idle_s: float
) -> Iterator[bytes]:
    """The result of ``make`` when the run has changed, ``idle`` when it has not for ``idle_s`` seconds."""
    reading, sent, sent_at, due_at = board.reading, None, SYSTEM.monotonic(), -math.inf
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not board.closed and run in reading.runs:
        now, mark = SYSTEM.monotonic(), (reading.runs[run].documents.serial, reading.store.connected)
        if mark != sent and now >= due_at and (content := make()) is not None:
            yield _event(content)
            sent, sent_at = mark, now
            due_at = now + max(STREAM_EVERY_S, len(content) / STREAM_BYTES_PER_S)
        elif now - sent_at >= idle_s:
            yield idle()
            sent_at = now
        wait_s = WAIT_STEP_S if mark == sent else min(WAIT_STEP_S, max(0.0, due_at - now))
        reading = board.wait(reading.serial, wait_s)


def _event(content: bytes | None) -> bytes:
    return b": nothing new\n\n" if content is None else b"data: " + content + b"\n\n"
