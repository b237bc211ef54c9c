"""Logs (structlog: lines for people, or JSON if the environment says so), and how a process ends with one sentence.

*Runs in* every process, once at its start; the hook in the main thread of a worker, when it ends.
*Owns* structlog's process-wide configuration, and a link of the chain at ``sys.excepthook``.
*Fails by* nothing: lines are dropped when the output's reader is gone. An error there would end the writing thread,
possibly the one that has to exit the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any, TextIO, cast

import structlog

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.settings import log_level, worker_environment
from elastic_trainer.variables import ENV_LOG_FORMAT

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


_UNREAD = (OSError, ValueError)
"""The errors of a stream that is closed, or whose other end is."""


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

    ``json`` chooses JSON lines or text; by default the environment chooses, and text if that is unset.
    """
    target = stream if stream is not None else sys.stderr
    as_json = os.environ.get(ENV_LOG_FORMAT) == "json" if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else _Text(target)
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


class _Text:
    """One line of text for each event; on a terminal wrapped at its width, elsewhere dated: files outlive the day."""

    def __init__(self, target: TextIO) -> None:
        self._on_terminal = target.isatty()

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        values = dict(event)
        values.pop("timestamp", None)
        level, what, trace = values.pop("level", method), values.pop("event", ""), values.pop("exception", "")
        where = _where(values)
        line = " ".join(
            [
                time.strftime("%H:%M:%S" if self._on_terminal else "%Y-%m-%d %H:%M:%S"),
                *([where] if where else []),
                *([f"{level.upper()}:"] if level in ("warning", "error", "critical") else []),
                str(what),
                *(f"{name}={_shown(value)}" for name, value in values.items() if value is not None),
            ]
        )
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            line = textwrap.fill(line, width, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
        return f"{line}\n{trace}" if trace else line


def _where(values: dict[str, Any]) -> str:
    """Node and rank, or node and role; removes them from ``values``. Empty for a process that is alone."""
    values.pop("run", None)
    node, role, rank = values.pop("node", None), values.pop("role", None), values.get("rank")
    if node in (None, "local"):
        values.pop("rank", None)
        return ""
    if role == "worker" and rank is not None:
        values.pop("rank")
        return f"[{node} rank {rank}]"
    return f"[{node}]"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ",".join(f"{name}:{_shown(each)}" for name, each in value.items())
    if isinstance(value, list | tuple | set):
        return ",".join(map(_shown, value))
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


def final_message(sentence: str = "") -> None:
    """Call before ``os._exit``: prints ``sentence`` on stderr and flushes this process's output. Never raises."""
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


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def complain(error: ElasticTrainerError, stream: TextIO) -> None:
    """Write ``error`` in one line to ``stream``, and to the file from which torchrun reads why a worker failed.

    Once per node for a ConfigError: what is wrong with the configuration or the data, all workers of a node find alike.
    """
    sentence = " ".join(str(error).split())
    _record(error, sentence)
    if not isinstance(error, ConfigError) or _finds_it_first(sentence):
        with contextlib.suppress(OSError, ValueError):
            print(f"error: {sentence}", file=stream, flush=True)


def _finds_it_first(sentence: str) -> bool:
    """Whether no worker of this node has printed this yet: torchrun ends all once one has ended, so none may wait.

    It gives those that it starts together one directory. Without it the first of the node speaks.
    """
    try:
        environment = worker_environment()
    except ConfigError:
        return True
    first_of_node = environment.local_rank == 0
    if environment.error_file is None:
        return first_of_node
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:16]
    try:
        (environment.error_file.parent.parent / f"printed-{digest}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return first_of_node
    return True


def _record(error: ElasticTrainerError, sentence: str) -> None:
    """As torch's ``@record`` does, whose own report holds the whole traceback: torchrun prints ``py_callstack``."""
    about = {"py_callstack": sentence, "timestamp": str(int(SYSTEM.wall()))}
    report = {"message": {"message": f"{type(error).__name__}: {sentence}", "extraInfo": about}}
    with contextlib.suppress(ConfigError, OSError):
        file = worker_environment().error_file
        if file is not None:
            part = file.with_name(f"{file.name}.part")
            part.write_text(json.dumps(report))
            part.replace(file)  # torchrun fails on half a file


class _ErrorHook:
    """Ends the process for errors of this package; all others go to the hook that it found."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ElasticTrainerError):
            self._before(kind, error, trace)
            return
        if structlog.is_configured():
            logger().debug("process.failed", exc_info=(kind, error, trace))
        complain(error, _stderr())
        raise SystemExit(error.exit_code)  # the only way from a hook to another exit code than 1


def _stderr() -> TextIO:
    """Not what torch's hook puts in its place: it forwards that only where the hook that it calls returns."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return sys.__stderr__ or sys.stderr
    return sys.stderr


def install_hook() -> None:
    """From now on the main thread's errors of this package end the process by one sentence and their exit code."""
    if not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)
