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
import importlib.util
import json
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Protocol

import psutil

from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.files import write_atomically
from elastic_trainer.jobs.task import Exhibits
from elastic_trainer.telemetry import logs

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

    def is_new(self, group: str, step: int) -> bool:
        """Whether ``step`` is new. It counts as logged from here on: a kill may lose one point, but doubles none."""
        if step <= self._steps.get(group, -1):
            return False
        self._steps[group] = step
        self._write()
        return True

    def _write(self) -> None:
        write_atomically(self._path, json.dumps({"run": self.id, "steps": self._steps}) + "\n")


TENSORBOARD_DIRECTORY = "tensorboard"


class TensorBoard(Logger):
    """Points behind ``opening.step`` that an earlier life of the run wrote are hidden."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(opening.directory / TENSORBOARD_DIRECTORY), purge_step=opening.step + 1)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)
        if group == "test":
            self._writer.flush()

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        for name, image in exhibits.images.items():
            self._writer.add_image(name, image, step)
        for name, text in exhibits.texts.items():
            self._writer.add_text(name, text, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


_WANDB = "wandb"
EXIT_S = 2 * LEAVE_S
"""How long the exit of a process waits for W&B, which itself waits 90 s for a server that is not there."""
_AGAIN_S = 0.5


class WandbLogger(Logger):
    """Steps are kept in ``train/step`` and ``test/step``: W&B's own counter belongs to a process."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._tracked = TrackedRun(opening.directory, _WANDB)
        if self._tracked.id is None:
            self._tracked.begin(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex)
        settings = wandb.Settings(console="off", silent=True)
        # A thread, as hooks run in an order that W&B decides. The main thread has ended before the first of them.
        threading.Thread(target=copy_context().run, args=(_limit_exit,), name="wandb-exit", daemon=True).start()
        wandb.setup(settings)
        self._run: Any = wandb.init(
            id=self._tracked.id,
            resume="allow",
            dir=str(opening.directory),
            config=dict(opening.config),
            settings=settings,
        )
        for group in ("train", "test"):
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self._tracked.is_new(group, step):
            self._run.log({f"{group}/step": step, **{f"{group}/{name}": value for name, value in values.items()}})

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        if not self._tracked.is_new("exhibits", step):
            return
        import wandb

        images = {name: wandb.Image(each.permute(1, 2, 0).numpy()) for name, each in exhibits.images.items()}
        texts = {name: wandb.Html(text, inject=False) for name, text in exhibits.texts.items()}
        self._run.log({"test/step": step, **images, **texts})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def _limit_exit() -> None:
    """End W&B's service when it keeps this process from its exit: what waits for the service then fails at once."""
    threading.main_thread().join()
    pause(EXIT_S)
    logs.logger().warning(
        "logger.unfinished",
        logger=_WANDB,
        waited_s=EXIT_S,
        hint="W&B is ended; `wandb sync` sends what it has written to the disk",
    )
    while True:  # until the process has ended: the service may be starting just now
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                child.kill()
        pause(_AGAIN_S)


_MLFLOW = "mlflow"
_PARAMS = 100
"""What MLflow takes at once."""


class MlflowLogger(Logger):
    """Through the client alone: the script's own active run of MLflow stays its own."""

    def __init__(self, opening: Opening) -> None:
        from mlflow.tracking import MlflowClient

        self._tracked = TrackedRun(opening.directory, _MLFLOW)
        self._client = MlflowClient()
        if self._tracked.id is None:
            self._tracked.begin(os.environ.get("MLFLOW_RUN_ID") or self._created(opening))
        assert self._tracked.id is not None
        self._id = self._tracked.id
        self._client.update_run(self._id, status="RUNNING")

    def _created(self, opening: Opening) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        where = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run: str = self._client.create_run(where, run_name=opening.directory.name).info.run_id
        params = [Param(name, str(value)) for name, value in _flat(opening.config).items()]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(run, params=params[begin : begin + _PARAMS])
        return run

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        if self._tracked.is_new(group, step):
            now = int(SYSTEM.wall() * 1000)
            metrics = [Metric(f"{group}/{name}", value, now, step) for name, value in values.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def exhibits(self, exhibits: Exhibits, step: int) -> None:
        if not self._tracked.is_new("exhibits", step):
            return
        for name, image in exhibits.images.items():
            self._client.log_image(self._id, image.permute(1, 2, 0).numpy(), f"{step}/{name}.png")
        for name, text in exhibits.texts.items():
            self._client.log_text(self._id, text, f"{step}/{name}.txt")

    def close(self, finished: bool) -> None:
        if finished:
            self._client.set_terminated(self._id, "FINISHED")


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``, as MLflow shows parameters."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


_KINDS = {
    "tensorboard": LoggerKind(TensorBoard, background=False, package="tensorboard"),
    "wandb": LoggerKind(WandbLogger, package="wandb"),
    "mlflow": LoggerKind(MlflowLogger, package="mlflow"),
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
