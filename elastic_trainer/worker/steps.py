"""One training step: from the gradients of its micro-batches to the moment that it counts.

That moment, the commit, is the hook behind the one optimizer step. Scheduler, scaler, step number and cursor advance
there together, so nothing that is raised later can make a step count twice or not at all.

*Runs in* the worker's main thread. *Owns* two hooks of the optimizer.
*Fails by* ConfigError when a step is used in a way that would train wrongly; what the body raises passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.worker import seeds
from elastic_trainer.worker.control import Control, Purpose
from elastic_trainer.worker.replica import Replica
from elastic_trainer.worker.scaling import Scaling
from elastic_trainer.worker.state import Position

LOSS_TIMEOUT_S = 120.0
_MOST_UNCHECKED = 64


class Step:
    """A step in progress, then its result. ``committed`` says whether it counts."""

    __slots__ = (
        "_backwards",
        "_batch",
        "_control",
        "_losses",
        "_mean",
        "_open_parts",
        "_part",
        "_steps",
        "committed",
        "generation",
        "number",
        "rank",
        "recorded",
        "world_size",
    )

    def __init__(self, steps: Steps, batch: Batch | None) -> None:
        self._steps, self._batch, self._control = steps, batch, steps.control
        self._part = batch
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._mean: float | None = None
        self._backwards = 0
        self._open_parts = False
        self.committed = self.recorded = False
        self.generation, self.rank, self.world_size = (
            steps.position.generation,
            steps.control.rank,
            steps.control.world_size,
        )
        self.number = steps.position.step + 1

    def __enter__(self) -> Step:
        self._steps.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._steps.closed(self, error)

    def micro_batches(self, batch: Batch | None = None) -> Iterator[Batch]:
        """The parts of ``batch`` to compute one after another; gradients are averaged over ranks with the last one."""
        whole = batch if batch is not None else self._batch
        if whole is None:
            raise ConfigError("there is no batch to divide", hint="draw it with session.batches()")
        parts = whole.micro_batches
        self._open_parts = True
        for part in parts[:-1]:
            self._part = part
            with self._steps.replica.accumulating():
                yield part
            part.release()
        self._part = parts[-1]
        self._open_parts = False
        yield parts[-1]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss``, the mean over the micro-batch (or batch) at hand.

        It is weighted so that the average over ranks becomes the gradient of the mean over the global batch.
        """
        weight = self._part.weight if self._part is not None else 1.0
        self._backwards += 1
        self._losses.append((loss.detach(), weight))
        factor = weight * self._steps.replica.share
        self._steps.replica.backward(self._steps.scaling.scaled(loss if factor == 1.0 else loss * factor))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over all parameters; the norm before."""
        self._steps.scaling.unscale()
        return torch.nn.utils.clip_grad_norm_(self._steps.replica.module.parameters(), max_norm)

    @property
    def loss(self) -> float | None:
        """The mean loss over the global batch; None before the commit.

        Found when first asked for, by a collective: ask on all ranks or on none. If the ranks have changed since, it
        is the mean over this rank's own samples.
        """
        if self._mean is None and self.committed:
            try:
                self._mean = self._global_mean()
            except RoundBrokenError as error:
                if not self._steps.absorb(self, error):
                    raise
                self._mean = self.local_mean()  # the round ended meanwhile: what is known here must do
        return self._mean

    def _global_mean(self) -> float | None:
        control = self._control
        if control is not self._steps.control:
            return self.local_mean()  # its ranks are together no more, and others may have come
        pending = control.start(Purpose.LOSS, [self.local_sum()])
        return pending.wait(LOSS_TIMEOUT_S)[0] / control.world_size

    def local_sum(self) -> float:
        """This rank's weighted losses; their sum over ranks is W times the global mean."""
        return sum(float(loss) * weight for loss, weight in self._losses if weight)

    def local_mean(self) -> float | None:
        """The mean loss over this rank's own samples; None if it had none."""
        total = sum(weight for _, weight in self._losses)
        return self.local_sum() / total if total else None

    @property
    def batch(self) -> Batch | None:
        """What the step is about, if it was drawn with ``session.batches``."""
        return self._batch

    # ---- for Steps

    def ready(self) -> None:
        """ConfigError unless the gradients are complete and right."""
        if self.committed:
            raise ConfigError("a second optimizer step in one session.step()", hint="open one step for each")
        if not self._backwards:
            raise ConfigError(
                "optimizer.step() without step.backward(loss)", hint="loss.backward() would weight ranks wrongly"
            )
        if self._open_parts:
            raise ConfigError(
                "not all micro-batches were used before optimizer.step()", hint="do not leave the loop over them early"
            )

    def finite_evidence(self) -> list[torch.Tensor]:
        """Losses to be looked at when it costs nothing."""
        return [loss for loss, weight in self._losses if weight]


class Steps:
    """Opens, commits and closes the steps of one model and optimizer.

    ``boundary`` is called at the end of each committed step, ``committed`` at the commit itself.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        scaling: Scaling,
        position: Position,
        *,
        seed: int,
        device: torch.device,
        boundary: Callable[[Step], None],
        absorb: Callable[[Step, BaseException], bool] = lambda step, error: False,
    ) -> None:
        self.absorb = absorb
        self.check_gradients: Callable[[], None] = lambda: None
        """Raises if the gradients at hand are not those of all ranks (asked right before the update)."""
        self.dirty = False
        """Between the optimizer's first change and the commit: this state is neither the old nor the new one."""
        self.replica, self.scaling, self.position = replica, scaling, position
        self.control = Control()
        self._optimizer, self._scheduler = optimizer, scheduler
        self._stream, self._device, self._boundary = seeds.key(seeds.STEP, seed), device, boundary
        self._current: Step | None = None
        self._schedule_count = _count(scheduler)
        self._unchecked: list[torch.Tensor] = []
        self._nonfinite = False
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def bind(self, control: Control) -> None:
        """Work in the round of ``control``, from a state that was just resumed."""
        self.control = control
        self._schedule_count = _count(self._scheduler)
        self._unchecked.clear()

    @property
    def inside(self) -> bool:
        """Whether a step is open."""
        return self._current is not None

    def begin(self, batch: Batch | None) -> Step:
        """The next step, about ``batch``."""
        if batch is not None and batch.used:
            raise ConfigError("this batch has been committed already", hint="open one session.step() for each batch")
        return Step(self, batch)

    def opened(self, step: Step) -> None:
        """The body begins."""
        if self._current is not None:
            raise ConfigError("session.step() inside another one", hint="end the first step before the next")
        self._current = step
        self.scaling.begin()
        self.replica.begin_step()
        self._optimizer.zero_grad(set_to_none=True)
        seeds.seed_all(seeds.key(self.position.step, self.control.rank, start=self._stream), self._device)

    def closed(self, step: Step, error: BaseException | None) -> bool:
        """The body has ended. True if its ``error`` was the end of a round, and has been dealt with."""
        if self._current is not step:
            return False
        try:
            if error is None and not step.committed and self.scaling.skipped():
                self._commit(step)
            if step.committed:
                self.scaling.after_update()
        finally:
            self._current = None
        if error is not None:
            return self.absorb(step, error)
        if not step.committed:
            raise ConfigError("the step ended without optimizer.step()", hint="call it once inside session.step()")
        try:
            self._boundary(step)
        except (RoundBrokenError, RuntimeError) as broken:
            if not self.absorb(step, broken):
                raise
        return False

    def undo(self) -> None:
        """Take back what a step that was not committed has left behind: gradients, buffers, the scaler's stage."""
        self._optimizer.zero_grad(set_to_none=True)
        self.replica.restore_buffers()
        self.scaling.reset()

    def nonfinite(self) -> bool:
        """Whether a loss since the beginning was NaN or infinite. Waits for the device once."""
        if self._unchecked:
            self._nonfinite |= not bool(torch.isfinite(torch.stack(self._unchecked)).all())
            self._unchecked.clear()
        return self._nonfinite

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._current
        if step is None:
            raise ConfigError("optimizer.step() outside session.step()", hint="wrap the step in `with session.step()`")
        step.ready()
        self.check_gradients()
        self.scaling.before_update()
        self.dirty = True

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._current is not None:
            self._commit(self._current)

    def _commit(self, step: Step) -> None:
        self.dirty = False
        self.position.step += 1
        self.position.lineage = self.position.generation
        step.committed = True
        if step.batch is not None:
            step.batch.used = True
            self.position.cursor = step.batch.following or self.position.cursor
        if not self.scaling.enabled:
            self._unchecked += step.finite_evidence()
            if len(self._unchecked) > _MOST_UNCHECKED:
                self.nonfinite()
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        if self._scheduler is None:
            return
        if _count(self._scheduler) != self._schedule_count:
            raise ConfigError(
                "the scheduler was advanced by the script, and the session advances it at each step",
                hint="remove scheduler.step(); to step it otherwise, register() it instead of passing it to wrap()",
            )
        self._scheduler.step()
        self._schedule_count = _count(self._scheduler)


def _count(scheduler: Any) -> Any:
    return getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", None))
