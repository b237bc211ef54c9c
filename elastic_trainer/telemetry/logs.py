"""structlog set-up: JSON off a terminal, colour on one; one line for each transition.

*Runs in* every process, once at its start. *Owns* structlog's process-wide configuration.
*Fails by* nothing: lines are dropped when the output's reader is gone. An error there would end the thread that writes,
possibly the one that has to end the process.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog

from elastic_trainer.settings import log_level

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_UNREAD = (OSError, ValueError)
"""How a stream fails whose other end, or which itself, is closed."""


class _Sink:
    """A stream whose reader may go away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(*_UNREAD):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(*_UNREAD):
            self._stream.flush()


def configure(stream: TextIO | None = None, *, level: str | None = None, json: bool | None = None) -> None:
    """Send logs to ``stream`` (default: stderr) at ``level`` (default: from the environment).

    ``json`` chooses the renderer; by default JSON lines are written unless the stream is a terminal.
    """
    target = stream if stream is not None else sys.stderr
    as_json = not target.isatty() if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS.get(level or log_level(), logging.INFO)),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Sink(target))),
        cache_logger_on_first_use=False,
    )


def last_words(sentence: str = "") -> None:
    """Before ``os._exit``: say ``sentence`` on stderr, and write out what this process has said. Never raises."""
    if sentence:
        _Sink(sys.stderr).write(f"{sentence}\n")
    for stream in (sys.stdout, sys.stderr):
        _Sink(stream).flush()


def bind(**values: Any) -> None:
    """Add ``values`` (run, node, role, round, rank) to every later line of this thread's context."""
    structlog.contextvars.bind_contextvars(**values)


def logger() -> Any:
    """The logger of this package; call ``.info("noun.past_participle", key=value)`` on it."""
    return structlog.get_logger("elastic_trainer")
