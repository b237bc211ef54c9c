"""When the state is saved, and saving it.

*Runs in* the worker's main thread; only rank 0 writes. *Owns* the checkpoint directory's manager.
*Fails by* CheckpointError (StorageError: the directory refuses) or NonFiniteError from :meth:`Saver.save`;
:meth:`Saver.attempt` returns them.
*Invariant*: a state with non-finite parameters is never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_trainer.checkpoint import CheckpointManager, Committed, SaveInfo
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import CheckpointError, ConfigError, NonFiniteError
from elastic_trainer.model import Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.training_state import TrainingState


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often to save. All ranks count the same steps; the seconds are rank 0's."""

    every_steps: int | None = None
    every_s: float | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"checkpoint_every_steps is {self.every_steps}", hint="it must be at least 1, or None")
        if self.every_s is not None and self.every_s <= 0:
            raise ConfigError(f"checkpoint_every_s is {self.every_s}", hint="it must be positive, or None")


class Saver:
    """Saves ``state`` through ``manager`` (None: nowhere), on the rank that saves.

    ``fields()`` is stored with it. ``on_saved`` gets every checkpoint.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        cadence: Cadence,
        state: TrainingState,
        fields: Callable[[], Mapping[str, Any]],
        on_saved: Callable[[Committed], None],
        tracker: HeartbeatReporter,
        clock: Clock = SYSTEM,
    ) -> None:
        self._held, self._cadence, self._state, self._fields = manager, cadence, state, fields
        self._on_saved, self._tracker, self._clock = on_saved, tracker, clock
        tracker.pulse.save_interval_s = cadence.every_s or 0.0
        self._last_s = clock.monotonic()
        self._last_step: int | None = None
        self._world_size = 1
        self._manager: CheckpointManager | None = None
        """None on ranks that do not save."""

    def serve(self, *, saves: bool, world_size: int = 1) -> None:
        """Whether this rank ``saves`` from now on."""
        self._manager, self._world_size = self._held if saves else None, world_size

    def resumed(self) -> None:
        """The present state was just read from a checkpoint."""
        self._last_step = self._state.position.step

    @property
    def unsaved(self) -> bool:
        return self._manager is not None and self._state.position.step != self._last_step

    def due_by_step(self, step: int) -> bool:
        return self._cadence.every_steps is not None and step % self._cadence.every_steps == 0

    def due_by_time(self) -> bool:
        """Whether enough seconds have passed since the last save or attempt."""
        every_s = self._cadence.every_s
        return self._manager is not None and every_s is not None and self._clock.monotonic() - self._last_s >= every_s

    def save(self, metrics: Mapping[str, float], *, best: bool = False) -> Committed | None:
        """Commit the state durably; None without a checkpoint directory."""
        self._last_s = self._clock.monotonic()
        if self._manager is None:
            return None
        began = self._clock.monotonic()
        try:
            with self._tracker.during(Phase.CHECKPOINT):
                committed = self._commit(self._manager, metrics, best=best)
        except (CheckpointError, NonFiniteError) as error:
            self._tracker.operated("save", self._clock.monotonic() - began, ok=False)
            if isinstance(error, NonFiniteError):  # the manager has logged all else
                logger().error("checkpoint.failed", step=self._state.position.step, reason=str(error))
            raise
        self._last_s, self._last_step = self._clock.monotonic(), self._state.position.step
        self._tracker.saved(self._last_step, committed.size, committed.duration_s)
        self._on_saved(committed)
        return committed

    def _commit(self, manager: CheckpointManager, metrics: Mapping[str, float], *, best: bool) -> Committed:
        state = self._state
        check_finite(state.module)
        position = state.position
        info = SaveInfo(
            step=position.step,
            round=position.generation,
            epoch=position.cursor.epoch,
            samples=position.cursor.samples,
            world_size=self._world_size,
            metrics=metrics,
            best=best,
            fields=self._fields(),
        )
        return manager.save(state.collect(), info)

    def attempt(self) -> CheckpointError | NonFiniteError | None:
        """Save on schedule. An error has been logged and is returned: it must not end the training."""
        try:
            self.save({})
        except (CheckpointError, NonFiniteError) as error:
            return error
        return None


def check_storage(manager: CheckpointManager | None, control: Control, environment: WorkerEnvironment) -> None:
    """Raise on all ranks if rank 0 cannot write checkpoints.

    Not where a process continues a training: the directory could be written when that began.
    """
    with control.agreed():
        if manager is None or control.rank != 0:
            return
        try:
            manager.check_writable()
            manager.sweep()
        except CheckpointError as error:
            if not _goes_on(manager, environment):
                raise
            logger().error("storage.refused", step=environment.reached, error=str(error))


def _goes_on(manager: CheckpointManager, environment: WorkerEnvironment) -> bool:
    """Whether the training was under way before: steps are known, or there is a checkpoint."""
    try:
        return environment.reached > 0 or (environment.midway and manager.newest() is not None)
    except CheckpointError:
        return False


def check_finite(module: torch.nn.Module) -> None:
    """NonFiniteError naming the first parameter that holds a NaN or an infinity."""
    with torch.no_grad():
        named = [(name, each) for name, each in module.named_parameters() if each.is_floating_point() and each.numel()]
        if not named:
            return
        wide = [each.sum(dtype=torch.float64 if each.device.type == "cpu" else torch.float32) for _, each in named]
        finite = torch.isfinite(torch.stack(wide))
        if bool(finite.all()):
            return
        for name, each in named:
            if not bool(torch.isfinite(each).all()):
                raise NonFiniteError(
                    f"parameter {name!r} is not finite any more; this state is not saved",
                    hint="lower the learning rate, clip gradients, or look for bad samples",
                )
