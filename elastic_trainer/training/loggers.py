"""The registry of experiment trackers, and a thread that isolates training from their failures.

A logger is opened by the process that is rank 0, with the run's directory. ``register_logger`` adds one of your own.

*Runs in* rank 0; what may wait for a network runs in a thread of its own (:class:`Background`).
*Owns* ``NAME.json`` in the run's directory: which run of the tracker this run is, and how far it has been logged.
*Fails by* ConfigError for a name that is unknown or not installed, before training. Later by nothing: a logger that
fails is given up with one warning.
*Invariant*: a run is one run of the tracker through all its lives, and its steps only rise: what a life repeats after
it fell back to a checkpoint is not logged again.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Protocol

from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry import logs
from elastic_trainer.training.files import write_atomically
from elastic_trainer.training.task import Exhibits

_WAITING = 1000
"""Points that may wait for a slow tracker; more are dropped, so that memory stays bounded."""
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker."""
LEAVE_S = 3.0
"""How long a process that leaves early does: others may wait for it."""
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Opening:
    """What a logger is opened with: the run's directory, the step where this process begins to log, the job file."""

    directory: Path
    step: int
    config: Mapping[str, Any] = field(default_factory=dict)


class Logger(Protocol):
    """Where values go. ``group`` is "train" or "test"; the steps of each rise."""

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None: ...

    def exhibits(self, exhibits: Exhibits, step: int) -> None: ...

    def close(self, finished: bool) -> None:
        """Write what waits. ``finished``: the training has come to its end; else another process may go on."""


Open = Callable[[Opening], Logger]


@dataclass(frozen=True, slots=True)
class LoggerKind:
    """How a logger is opened, whether in a thread of its own, and the package that it needs."""

    open: Open
    background: bool = True
    package: str | None = None


def _from(module: str, kind: str) -> Open:
    """The logger ``kind`` of a module here, which is slow to import: on first use."""
    return lambda opening: getattr(importlib.import_module(f"elastic_trainer.training.{module}"), kind)(opening)


_KINDS = {
    "tensorboard": LoggerKind(_from("tensorboard", "TensorBoard"), background=False, package="tensorboard"),
    "wandb": LoggerKind(_from("wandb_logger", "WandbLogger"), package="wandb"),
    "mlflow": LoggerKind(_from("mlflow_logger", "MlflowLogger"), package="mlflow"),
}


def register_logger(name: str, opener: Open, *, background: bool = True) -> None:
    """Let ``logging.loggers`` and ``RunLog`` know ``name``; call it on all ranks, ``opener`` is called on rank 0.

    Without ``background`` the logger is called in the main thread: only for one that never waits for a network.
    """
    _KINDS[name] = LoggerKind(opener, background)


def check_loggers(names: Sequence[str]) -> None:
    """ConfigError unless all ``names`` are registered and installed."""
    for name in names:
        if name not in _KINDS:
            raise ConfigError(f"there is no logger '{name}'", hint=f"use one of {', '.join(sorted(_KINDS))}")
        package = _KINDS[name].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the logger {name} is wanted, but the package {package} is not installed",
                hint=f"pip install 'elastic-trainer[{name}]', or leave it out",
            )


class Loggers:
    """All loggers of a run while this process is rank 0. One that raises is given up, with a warning."""

    def __init__(self, names: Sequence[str], opening: Opening) -> None:
        self._open: dict[str, Logger] = {}
        for name in dict.fromkeys(names):
            try:
                kind = _KINDS[name]
                self._open[name] = Background(name, kind.open, opening) if kind.background else kind.open(opening)
            except Exception as error:  # noqa: BLE001 - the edge to others' code: a log is never worth a training run
                _given_up(name, error)

    @property
    def any(self) -> bool:
        return bool(self._open)

    def scalars(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        known = {name: float(value) for name, value in values.items() if value is not None}
        self._each(lambda logger: logger.scalars(group, known, step))

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        self._each(lambda logger: logger.exhibits(exhibits, step))

    def close(self, finished: bool) -> None:
        self._each(lambda logger: logger.close(finished))
        self._open = {}

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                act(logger)
            except Exception as error:  # noqa: BLE001 - the same edge
                del self._open[name]
                _given_up(name, error)


def _given_up(name: str, error: Exception) -> None:
    logs.logger().warning(
        "logger.given_up", logger=name, error=str(error) or type(error).__name__, hint="training goes on without it"
    )


class Background:
    """A logger that is opened and used by a thread of its own: training never waits for it, but for its end."""

    _threads: ClassVar[dict[str, Thread]] = {}
    """The last of each name: one that still writes what a process logged as rank 0 goes before the next."""

    def __init__(self, name: str, opener: Open, opening: Opening, close_s: float = CLOSE_S) -> None:
        self._name, self._close_s = name, close_s
        self._work: queue.Queue[Callable[[Logger], None]] = queue.Queue(_WAITING)
        self._closing = Event()
        self._finished = self._dropped = False
        serve = partial(copy_context().run, self._serve, opener, opening, self._threads.get(name))
        self._thread = self._threads[name] = Thread(target=serve, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._put(lambda logger: logger.scalars(group, values, step))

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        if exhibits.images or exhibits.texts:
            self._put(lambda logger: logger.exhibits(exhibits, step))

    def close(self, finished: bool) -> None:
        """At the end of the training wait for what waits; where rank 0 moves, training goes on meanwhile."""
        self._finished = finished
        self._closing.set()
        if finished:
            self._wait(self._close_s)

    def _wait(self, limit_s: float) -> None:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            logs.logger().warning("logger.unfinished", logger=self._name, waited_s=limit_s)

    def _at_exit(self) -> None:
        if self._thread.is_alive():
            self._closing.set()
            self._wait(LEAVE_S)

    def _put(self, act: Callable[[Logger], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._work.put_nowait(act)
        except queue.Full:
            if not self._dropped:
                logs.logger().warning("logger.behind", logger=self._name, hint="points are dropped until it is faster")
            self._dropped = True

    def _serve(self, opener: Open, opening: Opening, before: Thread | None) -> None:
        try:
            if before is not None:
                before.join()
            logger = opener(opening)
            atexit.register(self._at_exit)  # after the tracker's own, so before it: those run backwards
            for act in iter(self._next, None):
                act(logger)
            logger.close(self._finished)
        except Exception as error:  # noqa: BLE001 - the edge of the thread, and to others' code
            _given_up(self._name, error)
        finally:
            atexit.unregister(self._at_exit)

    def _next(self) -> Callable[[Logger], None] | None:
        """What is to be logged next; None when that is all."""
        while True:
            closing = self._closing.is_set()
            with suppress(queue.Empty):
                return self._work.get(timeout=0.0 if closing else _LOOK_S)
            if closing:
                return None


class TrackedRun:
    """``NAME.json`` in ``directory``: the tracker's id of this run and the last step logged of each group.

    Rank 0 may move to another node, so the directory has to be one that all nodes see.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.json"
        read = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self.id: str | None = read.get("run")
        self._steps: dict[str, int] = dict(read.get("steps", {}))

    def begin(self, run: str) -> None:
        """This is the run from now on."""
        self.id, self._steps = run, {}
        self._write()

    def advance(self, group: str, step: int) -> bool:
        """Whether ``step`` is new. It counts as logged from here on: a kill may lose one point, but doubles none."""
        if step <= self._steps.get(group, -1):
            return False
        self._steps[group] = step
        self._write()
        return True

    def _write(self) -> None:
        write_atomically(self._path, json.dumps({"run": self.id, "steps": self._steps}) + "\n")
