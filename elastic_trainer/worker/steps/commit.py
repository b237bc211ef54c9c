"""The steps of a training: their opening, their commit and their end.

A step commits in the hook after its one optimizer step; with several optimizers, when its block ends. Scheduler,
scaler, step number and cursor advance there together, so no later error can make a step count twice or not at all.

*Runs in* the worker's main thread. *Owns* two hooks of the optimizer.
*Fails by* ConfigError for a step that would train wrongly; errors of the body pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model.loss_scaling import Scaling
from elastic_trainer.worker.model.replica import Replica
from elastic_trainer.worker.model.trainable import Trainable
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state import rng
from elastic_trainer.worker.state.optimizer_set import OptimizerSet, advanced, members_of
from elastic_trainer.worker.state.training_state import TrainingState
from elastic_trainer.worker.steps import closures
from elastic_trainer.worker.steps.feed import DataFeed
from elastic_trainer.worker.steps.one_round import RoundEnd
from elastic_trainer.worker.steps.step import Step

StepT = TypeVar("StepT", bound=Step)
_MOST_UNCHECKED = 64


class Steps:
    """Opens, commits and closes the steps of one model and optimizer. ``after_step`` passes the next boundary."""

    def __init__(
        self,
        replica: Replica,
        state: TrainingState,
        feed: DataFeed,
        tracker: HeartbeatReporter,
        seed: int,
        round_end: RoundEnd,
        after_step: Callable[[Step], None],
    ) -> None:
        self._round_end, self._after_step, self._feed, self._tracker = round_end, after_step, feed, tracker
        self._lost: BaseException | None = None
        """Set if the round ended before the body of the present step began, or in it behind the commit."""
        self._own_lrs: list[tuple[dict[str, Any], Any]] = []
        self.dirty = False
        """Between the optimizer's first change and the commit: the state is neither the old nor the new one."""
        self.updating = False
        """While an optimizer of the session is at work."""
        self._before: dict[torch.optim.Optimizer, closures.Before] = {}
        """The state before updates that collectives follow in the same step."""
        self._prepared: tuple[Step, bool] | None = None
        """The step that peers may commit from now on, and whether with an update."""
        self._rolls = False
        """During an update that a peer has made before."""
        self.replica, self.position, self.control = replica, state.position, Control()
        self.scaling = Scaling(state.scaler, state.optimizer, replica.anywhere if replica.layout is not None else None)
        self._optimizer, self._scheduler, self._average = state.optimizer, state.scheduler, state.average
        self._stream, self._sample_stream = rng.key(rng.STEP, seed), rng.key(rng.SAMPLE, seed)
        self._seed_all = rng.seeder(state.device)
        self._epoch, self._epoch_stream = -1, 0
        self._current: Step | None = None
        self.begun = 0
        """Steps of this round, whatever came of them."""
        self.trainable = Trainable(self.replica.module, self._optimizer)
        self._agreed = False
        """Whether all ranks of the round are known to train the same parameters."""
        self._schedule_count = advanced(self._scheduler)
        self._unchecked: list[torch.Tensor] = []
        self._nonfinite = False
        self._loss, self._substituted = math.nan, False
        self.several = isinstance(self._optimizer, OptimizerSet)
        for each in members_of(self._optimizer):
            each.register_step_pre_hook(self._before_update)
            each.register_step_post_hook(self._after_update)

    def bind(self, control: Control) -> None:
        self.control = control
        self.trainable.look()
        self._agreed = False
        self._schedule_count = advanced(self._scheduler)
        self._unchecked.clear()
        self.begun = 0

    @property
    def inside(self) -> bool:
        return self._current is not None

    @property
    def uncommitted(self) -> int | None:
        """The number of the open step, if it is not committed yet."""
        step = self._current
        return step.number if step is not None and not step.committed else None

    def begin(self, batch: Batch | None, kind: Callable[[Steps, Batch | None], StepT]) -> StepT:
        if batch is not None and batch.used:
            raise ConfigError("this batch has been committed already", hint="open one session.step() for each batch")
        return kind(self, batch)

    def opened(self, step: Step) -> None:
        if self._current is not None:
            raise ConfigError("session.step() inside another one", hint="end the first step before the next")
        self.begun += 1
        self._lost = self._meet()
        self._current, self.updating = step, False
        self._tracker.step_begins(step.number)
        self.scaling.begin()
        self._follow()
        self.replica.begin_step(counts=step.batch is None or step.batch.weight > 0.0)
        self._drop_gradients()
        batch = step.batch
        if batch is None:
            self._seed_all(rng.key(self.position.step, self.replica.part(self.control).rank, start=self._stream))
        else:
            self._seed(batch)

    def _meet(self) -> RoundBrokenError | None:
        """Compare plans. If the round ends here, the error is raised in the body: only there it can be absorbed."""
        try:
            self._feed.accord.at_step(self.position.cursor.epoch)
            self.replica.share_buffers()
        except RoundBrokenError as error:
            return error
        return None

    def absorb(self, step: Step, error: BaseException) -> bool:
        """Whether ``error`` was the end of a round, and is handled: behind the body, whose end belongs to the round."""
        if self._current is step:
            self._lost = error
            return True
        return self._round_end.absorb(step, error)

    def check_round(self) -> None:
        """RoundBrokenError if the round had ended when the body began."""
        if self._lost is not None:
            raise self._lost

    def _follow(self) -> None:
        """Train what the script has frozen, unfrozen and regrouped since the last step."""
        if self.replica.fitted and self.trainable.switched:
            self.replica.fit(self.control, self.trainable.switch())
            self._agreed = False
            self.trainable.look()
        elif self.trainable.regrouped:
            self.trainable.look()

    def agree(self) -> None:
        """Before a backward pass: all ranks train the same parameters. They may notice a change at different steps."""
        if not self._agreed:
            self.trainable.agree(self.control)
            self._agreed = True

    def begin_micro_batch(self, part: Batch) -> None:
        """Seed ``part`` with random numbers that do not depend on the number of ranks."""
        self.replica.begin_micro_batch(counts=part.weight > 0.0)
        self._seed(part)

    def _seed(self, part: Batch) -> None:
        if part.epoch != self._epoch:
            self._epoch, self._epoch_stream = part.epoch, rng.key(part.epoch, start=self._sample_stream)
        self._seed_all(rng.key(part.start, start=self._epoch_stream))

    def closed(self, step: Step, error: BaseException | None) -> bool:
        """After the body. True if its ``error`` was the end of a round, and has been handled."""
        if self._current is not step:
            return False
        try:
            if error is None and not step.committed and (step.updated or step.skipped or self.scaling.skipped()):
                if step.updated:
                    step.sum_wanted_loss()
                self._prepare(step, updates=False)
                self._commit(step)
            if step.skipped:
                self.scaling.reset()
            elif step.committed:
                self.scaling.after_update()
        except RoundBrokenError as broken:
            error = broken
        finally:
            self._current = None
            self._restore_lr()
        if error is not None:
            return self.absorb(step, error)
        if self._lost is not None:
            if not self.absorb(step, self._lost):
                raise self._lost
            return False
        if not step.committed:
            raise ConfigError("the step ended without optimizer.step()", hint="call it once inside session.step()")
        try:
            self._after_step(step)
        except (RoundBrokenError, RuntimeError) as broken:
            if not self.absorb(step, broken):
                raise
        return False

    def _drop_gradients(self) -> None:
        """Of all parameters, also those without optimizer: a gradient left over would be summed over the ranks again.

        ``zero_grad()`` of torch's optimizers takes many times as long because of its profiler record.
        """
        if type(self._optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self._optimizer.zero_grad(set_to_none=True)
        for parameter in self.trainable.parameters:
            parameter.grad = None

    def pass_over(self, cursor: Cursor) -> None:
        """Commit a step without samples and without an update; ``cursor`` is behind its batch. All ranks do it."""
        self.position.step += 1
        self.position.lineage, self.position.cursor = self.position.generation, cursor
        self._tracker.committed(self.position.step, 0, cursor)
        self._advance_schedule()

    def update(self) -> None:
        """Step the optimizer, in the open step."""
        self._optimizer.step()

    def abandon(self, step: Step) -> None:
        """The script has left its loop in the middle of ``step``."""
        if self._current is step:
            self._current = None
            self._restore_lr()
            self.undo()

    def disown(self) -> None:
        """In a forked child: an open step is the parent's."""
        self._current = None

    def undo(self) -> None:
        """Undo what an uncommitted step left behind: gradients, buffers, the scaler's stage.

        An incomplete update stays (:attr:`dirty`) unless the state before it was kept. So does a prepared one.
        """
        if self._prepared is not None:
            return
        if self._before:
            for each in self._before.values():
                each.restore()
            self._before, self.dirty = {}, False
        self._drop_gradients()
        self.replica.undo()
        self.scaling.reset()
        self._tracker.gave_up()

    def knows_loss(self, mean: float | None) -> None:
        self._loss = self._loss if mean is None else mean
        self._tracker.knows_loss(mean)

    def loss_before(self, step: Step, reason: str) -> float:
        """The last known loss, for a ``step`` that has none of its own; logged the first time."""
        if not self._substituted:
            self._substituted = True
            hint = "ask for step.loss under `if step.committed:`"
            logger().warning("loss.substituted", step=step.number, reason=reason, given=self._loss, hint=hint)
        return self._loss

    def nonfinite(self) -> bool:
        """Whether a loss since the start (or :meth:`forgive`) was NaN or infinite. Waits for the device once."""
        if self._unchecked:
            self._nonfinite |= not bool(torch.isfinite(torch.stack(self._unchecked)).all())
            self._tracker.knows_loss(float(self._unchecked[-1]), own=True)
            self._unchecked.clear()
        return self._nonfinite

    def forgive(self) -> None:
        """The non-finite loss was reported: look at later losses only."""
        self._nonfinite = False

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        step = self._current
        if step is None:
            raise ConfigError("optimizer.step() outside session.step()", hint="wrap the step in `with session.step()`")
        closure, changed = closures.of(args, kwargs), None
        if self._rolls:
            self._begin_update(optimizer)
            return None
        if self.several:
            self._check_member(step, optimizer, closure)
        elif closure is None:
            self._check(step)
        elif self.replica.layout is not None or self.replica.apart:
            what = "reduction='local_sgd' or 'diloco'" if self.replica.apart else "a sharded model"
            raise ConfigError(
                f"{what} does not go with a closure", hint="call optimizer.step() after step.backward(loss)"
            )
        else:
            changed = (optimizer,), {**kwargs, "closure": self._called(step, closure, optimizer)}
        self.scaling.before_update()
        self._prepare(step, updates=True)
        self._begin_update(optimizer)
        return changed

    def _check_member(self, step: Step, optimizer: torch.optim.Optimizer, closure: closures.Closure | None) -> None:
        """Another pass may follow this update, and fail: in place keep what was there before the first one."""
        if closure is not None:
            raise ConfigError(
                "one of several optimizers does not go with a closure",
                hint="call its step() after step.backward(loss)",
            )
        self.check_round()
        step.ready()
        self._round_end.check_gradients()
        if self.replica.lasting and optimizer not in self._before:
            self._before[optimizer] = closures.Before(optimizer)

    def _begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._scale_lr(optimizer)
        self.dirty = self.updating = True

    def _prepare(self, step: Step, *, updates: bool) -> None:
        """All ranks of a shard group commit ``step``, or none does.

        From here on the gradients stay until it is known whether a peer has committed it: see :meth:`settle`.
        """
        if self.replica.layout is None:
            return
        if getattr(self._optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "a GradScaler with a fused optimizer does not go with a sharded model", hint="leave fused=True out"
            )
        self._prepared = step, updates
        self.replica.commit_together(step.number)

    @property
    def prepared(self) -> int:
        """The number of the step that a peer may have committed; 0 if there is none."""
        return self._prepared[0].number if self._prepared is not None else 0

    def settle(self, *, committed: bool) -> Step | None:
        """A round ended when this rank was prepared: make the update too if a peer has ``committed`` it, else undo it.

        Returns the step if it was committed here.
        """
        if self._prepared is None:
            return None
        (step, updates), self._prepared = self._prepared, None
        if not committed:
            self.undo()
            return None
        self._current, self._rolls = step, True
        try:
            if updates:
                self._optimizer.step()
            else:
                self._commit(step)
            self.scaling.after_update()
        finally:
            self._current, self._rolls = None, False
            self._restore_lr()
        logger().info("step.rolled_forward", step=step.number)
        return step

    def _check(self, step: Step) -> None:
        self.check_round()
        step.ready()
        self._check_trained()
        self._round_end.check_gradients()

    def _called(self, step: Step, closure: closures.Closure, optimizer: torch.optim.Optimizer) -> closures.Closure:
        """What the optimizer calls in place of the ``closure``."""
        if closures.calls_once_first(optimizer):
            with torch.enable_grad():
                loss = closure()
            self._check(step)
            return lambda: loss
        if self.scaling.enabled:
            raise ConfigError(
                f"a GradScaler does not go with {type(optimizer).__name__}, which computes gradients during its update",
                hint="use bfloat16, which needs no scaler",
            )
        if self.replica.lasting:
            self._before = {optimizer: closures.Before(optimizer)}

        def called() -> torch.Tensor:
            step.again()
            closure()
            self._check(step)
            return step.mean_of_pass()

        return called

    def _check_trained(self) -> None:
        if self.replica.fitted and self.trainable.switched:
            raise ConfigError(
                f"{self.trainable.switch()} inside a step", hint="freeze and unfreeze parameters between two steps"
            )
        if not self.replica.summed:
            self.trainable.look()
            raise ConfigError(
                "gradients were not summed over the ranks: a parameter had none, or the loss is not of what"
                " session.wrap() returned",
                hint="call the wrapped model; if parameters are unused, ddp_options={'find_unused_parameters': True}",
            )

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_lr()
        self.updating = False
        step = self._current
        if step is not None and self.several:
            step.updated = True
        elif step is not None:
            self._commit(step)

    def _scale_lr(self, optimizer: torch.optim.Optimizer) -> None:
        self._restore_lr()
        factor = self._feed.lr_factor()
        if factor != 1.0:
            self._own_lrs = [(group, group["lr"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _restore_lr(self) -> None:
        for group, own in self._own_lrs:
            group["lr"] = own
        self._own_lrs = []

    def _commit(self, step: Step) -> None:
        if self._average is not None:
            self._average.update_parameters(self.replica.module)
        self._before, self._prepared, self.dirty = {}, None, False
        self.position.step += 1
        self.position.lineage = self.position.generation
        step.committed = True
        if step.batch is not None:
            step.batch.used = True
            self.position.cursor = step.batch.following or self.position.cursor
        samples = len(step.batch.ids) if step.batch is not None and step.counts else 0
        self._tracker.committed(self.position.step, samples, self.position.cursor)
        if not self.scaling.enabled:
            self._unchecked += step.finite_evidence()
            if len(self._unchecked) > _MOST_UNCHECKED:
                self.nonfinite()
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        if self._scheduler is None:
            return
        if advanced(self._scheduler) != self._schedule_count:
            raise ConfigError(
                "the scheduler was advanced by the script, and the session advances it at each step",
                hint="remove scheduler.step(); to step it otherwise, register() it instead of passing it to wrap()",
            )
        self._scheduler.step()
        self._schedule_count = advanced(self._scheduler)
