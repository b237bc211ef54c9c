"""How a process ends with an error of this package: one sentence on stderr and the error's exit code, no traceback.

*Runs in* the main thread of a worker, when it ends. *Owns* a link of the chain at ``sys.excepthook``.
*Fails by* nothing: what cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import structlog

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.settings import worker_environment
from elastic_trainer.telemetry import logs

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
            file.write_text(json.dumps(report))


class _ErrorHook:
    """Ends the process for errors of this package; all others go to the hook that it found."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ElasticTrainerError):
            self._before(kind, error, trace)
            return
        if structlog.is_configured():
            logs.logger().debug("process.failed", exc_info=(kind, error, trace))
        complain(error, _stderr())
        raise SystemExit(error.exit_code)  # the only way from a hook to another exit code than 1


def _stderr() -> TextIO:
    """Not what torch's hook puts in its place: it forwards that only where the hook that it calls returns."""
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return sys.__stderr__ or sys.stderr
    return sys.stderr


def install() -> None:
    """From now on the main thread's errors of this package end the process by one sentence and their exit code."""
    if not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)
