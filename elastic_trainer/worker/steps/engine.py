"""The engine of a training: what happens from the opening of a step to the boundary behind it.

From top to bottom, in the order in which it happens:

- :class:`Step`, which the script holds: micro-batches, backward passes, loss, clipping. The gradient becomes that of
  the mean over the global batch. :class:`ManualStep` is the one of a loop that is not the session's.
- :class:`Steps` opens a step, commits and closes it, and undoes it when the round ends. It commits in the hook after
  its one optimizer step; with several optimizers, when its block ends. Scheduler, scaler (:class:`Scaling`), number and
  cursor advance there together, so no later error can make a step count twice or not at all.
- :class:`StepBoundaries`, behind each step: comparing ranks, saving, and what all ranks decide together
  (:class:`Consensus`).
- :class:`WorkerContext`, what a process has from the opening of its session to the end, across rounds.

*Runs in* the worker's main thread; the signals' thread reads the present round. *Owns* two hooks of the optimizer, the
ledger, the feed and the manager of the checkpoints.
*Fails by* ConfigError for a step that would train wrongly, NonFiniteError, DifferError, SystemExit 73 where the last
save fails and 143 when stopped; errors of the body pass through. When a peer is gone, recovery takes the
RoundBrokenError (``absorb`` in worker.recovery): in place the script goes on behind the step, else the process ends.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import xxhash
from torch.amp.grad_scaler import OptState

from elastic_trainer import torch_internals
from elastic_trainer.checkpoint import CheckpointManager, Committed, Owner
from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.data import seeds
from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_RESTARTED,
    ConfigError,
    DifferError,
    NonFiniteError,
    RejoinError,
    RoundBrokenError,
    StorageError,
    TransientError,
)
from elastic_trainer.ipc.page import ORDER_SUFFIX
from elastic_trainer.model import Cursor, Phase, RunOrder
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry import logs
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm import groups
from elastic_trainer.worker.comm.control import Control, EqualityCheck, Pending, Purpose
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.model import digests
from elastic_trainer.worker.model.replica import DataPart, Pass, Replica, Trainable, Use
from elastic_trainer.worker.recovery import Recovery
from elastic_trainer.worker.report import HeartbeatReporter, Ledger
from elastic_trainer.worker.state.saver import Saver
from elastic_trainer.worker.state.training_state import (
    Position,
    TrainingState,
    advanced,
    load_exactly,
    members_of,
    parameters_of,
)
from elastic_trainer.worker.steps.audit import PassAudit
from elastic_trainer.worker.steps.feed import DataFeed
from elastic_trainer.worker.steps.options import SessionOptions
from elastic_trainer.worker.steps.records import StepRecords
from elastic_trainer.worker.steps.signals import Signals


class Step:
    """A step in progress, then its result.

    Attributes:
        committed: Whether the step counts. False: the ranks have changed, and the batch comes again.
        skipped: Whether it made no update on purpose.
        number: Which step of the run it is, from 1.
        generation: The state's generation: it grows with each change of the ranks.
        rank: This process among those that make the step.
        world_size: How many make it.
        batch: What it is about, if that was drawn with ``session.batches``.
    """

    def __init__(self, steps: Steps, batch: Batch | None) -> None:
        self._steps, self._control = steps, steps.control
        self.batch = self._part = batch
        """What the step is about, if it was drawn with ``session.batches``, and the part that is computed now."""
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._mean: float | None = None
        self._wanted = False
        self._pending: Pending | None = None
        """The sum of the losses, started after the last backward pass."""
        self._count_here: float | None = None
        """The items counted on this rank, if losses are sums."""
        self._normalized = False
        self.norm: torch.Tensor | None = None
        """The norm of the gradients before :meth:`clip`, if that was called."""
        self._done: set[int] = set()
        """First positions of the micro-batches that have had a backward pass."""
        self._open_parts = False
        self.committed = self.recorded = self.skipped = self.updated = False
        self.number, self.generation = steps.position.step + 1, steps.position.generation
        self.rank, self.world_size = steps.control.rank, steps.control.world_size
        self.counts = steps.part.first
        """Whether this rank's samples count: others may have computed with the same ones."""

    def __enter__(self) -> Step:
        self._steps.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._steps.closed(self, error)

    def micro_batches(self, batch: Batch | None = None) -> Iterator[Batch]:
        """The parts of ``batch`` to compute one after another; the last one averages gradients over ranks.

        ``batch`` is the one at hand, and may be left out. Do not leave the loop early.
        """
        whole = self.batch
        if whole is None:
            raise ConfigError("there is no batch to divide", hint="draw it with session.batches()")
        if batch is not None and batch is not whole:
            raise ConfigError(
                "step.micro_batches() of another batch than the step is about",
                hint="give it the batch that session.batches() drew last, or none",
            )
        parts = whole.micro_batches
        self._open_parts = True
        for part in parts[:-1]:
            self._begin(part)
            with self._steps.replica.accumulating():
                yield part
            part.release()
        self._begin(parts[-1])
        self._open_parts = False
        yield parts[-1]

    def _begin(self, part: Batch) -> None:
        self._part = part
        self._steps.begin_micro_batch(part)

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        """Add the gradient of ``loss``, the mean over the present micro-batch (or batch).

        It is weighted so that the average over ranks becomes the gradient of the mean over the global batch.

        With ``count``, ``loss`` is instead the *sum* over ``count`` items (tokens, say), and the gradient becomes that
        of the sum over the global batch divided by the count of the global batch: each item weighs the same, however
        unevenly they are distributed. Pass it for all micro-batches of a step or for none. Until the global count is
        known, gradients are as large as those of a sum over one sample: a GradScaler for float16 should start lower
        than usual. If nothing counts in the whole global batch, the gradient is zero and the update is made all the
        same.
        """
        steps, part, replica = self._steps, self._part, self._steps.replica
        steps.check_round()
        if self._done and (count is None) != (self._count_here is None):
            raise ConfigError("backward(loss, count) for some micro-batches only", hint="say the count for all or none")
        weight = replica.before_backward(part, self._done)
        steps.check_trained()
        if part is not None and part.outdated:
            raise ConfigError(
                "the loss is of data read before the ranks changed, and this rank's part of the batch is another now",
                hint="read batch.x, batch.y or batch.data again for each session.step(), or draw the batch anew",
            )
        self._done.add(0 if part is None else part.start)
        last, pending, self._pending = not self._open_parts, None, None
        if last:
            self._check_complete()
        if count is not None:
            weight = self._count(float(count), counts=weight > 0.0)
            if last:
                pending = replica.counting(self._control).start(Purpose.COUNT, [self._count_here or 0.0])
        about, factor = Pass(part, loss.detach(), weight, last), weight * replica.share
        self._losses.append((about.loss, weight))
        mean = replica.backward(steps.scaling.scaled(loss if factor == 1.0 else loss * factor), about)
        self._mean = mean if last else self._mean
        if pending is not None:
            self._normalize(pending.wait()[0] / steps.part.alike)
        if last and self._mean is None and steps.sums_after_each_pass:
            # After the pass: it has just synchronised the ranks, and its kernels are queued on the device.
            self.sum_wanted_loss()

    def sum_wanted_loss(self) -> None:
        """All passes are made."""
        if self._wanted:
            self._pending = self._sum_losses()

    def want_loss(self) -> None:
        """Compute :attr:`loss` during the update, so that nobody waits for it afterwards.

        Call it before the backward pass, on all ranks or on none.
        """
        self._wanted = True

    def pipeline(
        self,
        loss: Callable[[torch.Tensor, Batch], torch.Tensor],
        *,
        inputs: Callable[[Batch], torch.Tensor | tuple[torch.Tensor, ...]] | None = None,
        count: Callable[[Batch], float] | None = None,
        schedule: str | None = None,
    ) -> None:
        """Compute the batch's micro-batches through all stages of the model and back, in place of :meth:`backward`.

        ``inputs(part)`` are those of the first stage (``part.x``), one row for each sample. ``loss(output, part)`` is
        the mean loss over a micro-batch, computed on the last stage. ``schedule``, as in torch: "1F1B" (the default) or
        "GPipe"; with several stages on each rank "Interleaved1F1B" (the default) or "LoopedBFS".

        With ``count``, ``loss`` is instead the sum over ``count(part)`` items, as in :meth:`backward`. All ranks call
        it.
        """
        steps, replica, batch = self._steps, self._steps.replica, self.batch
        steps.check_round()
        if batch is None or self._done:
            raise ConfigError(
                "step.pipeline() without a batch, or a second time",
                hint="draw with session.batches(..., micro_batch_size=...), and call it once in each step",
            )
        replica.before_backward(batch.micro_batches[0], ())
        steps.check_trained()
        parts = batch.micro_batches
        read = map(inputs, parts) if inputs is not None else (part.x for part in parts)
        given = [each if isinstance(each, tuple) else (each,) for each in read]
        found: dict[int, tuple[torch.Tensor, float]] = {}
        weights, pending = [part.weight for part in parts], None
        if count is not None:
            weights = [self._count(float(count(part)), counts=part.weight > 0.0) for part in parts]
            pending = self._control.start(Purpose.COUNT, [self._count_here or 0.0])

        def loss_of(output: torch.Tensor, number: int) -> torch.Tensor:
            value = loss(output[: len(given[number][0])], parts[number])
            found[number] = value.detach(), weights[number] * replica.loss_weight
            return steps.scaling.scaled(value * (weights[number] * replica.share))

        if not replica.loss_weight:
            steps.scaling.scaled(torch.zeros((), device=given[0][0].device))  # a scaler begins with its first loss
        replica.run(schedule, given, loss_of)
        self._done = {part.start for part in parts}
        self._losses = [found[number] for number in sorted(found)]
        if pending is not None:
            self._normalize(pending.wait()[0] / steps.part.alike)
        self.sum_wanted_loss()

    def _count(self, count: float, *, counts: bool) -> float:
        """Add ``count``; returns the factor for the sum until the count of the global batch is known."""
        if not math.isfinite(count) or count < 0:
            raise ConfigError(
                f"backward(loss, count) with a count of {count:g}", hint="count the items that the loss sums"
            )
        if self._normalized:
            raise ConfigError("a second backward(loss, count) of one batch", hint="add the losses up first")
        self._count_here = (self._count_here or 0.0) + (count if counts else 0.0)
        return self._steps.replica.averaged_over / self._items if counts else 0.0

    @property
    def _items(self) -> int:
        """The samples of the global batch: a first divisor for sums of losses, the same on all ranks."""
        return max(1, self._part.global_size) if self._part is not None else 1

    def _normalize(self, total: float) -> None:
        """Gradients and losses are sums divided by ``_items``; divide by the global ``total`` instead."""
        self._normalized = True
        factor = self._items / total if total else 0.0
        self._steps.replica.scale_gradients(factor)
        self._losses = [(loss, weight * factor) for loss, weight in self._losses]
        if self._mean is not None:  # the tree's, the only one known before the commit
            self._mean *= factor

    def _check_complete(self) -> None:
        """The last micro-batch is done: ConfigError if another one had no backward pass."""
        batch = self.batch
        if batch is None or self._part is batch:
            return
        if len(self._done) < len({part.start for part in batch.micro_batches}):
            raise ConfigError(
                "a micro-batch had no backward pass, so the gradient would lack its samples",
                hint="call step.backward(loss) for each, with a loss of zero where nothing counts",
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over all parameters; the norm before."""
        self._steps.scaling.unscale(self._steps.trainable.outside)
        self.norm = self._steps.replica.clip(max_norm)
        return self.norm

    def skip(self) -> None:
        """In place of ``optimizer.step()``, on all ranks alike: the step commits without an update when it ends.

        Its loss may be NaN. Its samples count as used and the schedule advances. ConfigError if another rank is in
        another call of all ranks; one that computes gradients instead waits for this one, until the agent ends both as
        hung: decide by what all ranks know, such as ``session.all_reduce(flag)``.
        """
        self._steps.check_round()
        if self.committed or self.updated:
            raise ConfigError("step.skip() after optimizer.step()", hint="skip before the update")
        self._control.sum(Purpose.SKIP)
        self.skipped = True

    @property
    def loss(self) -> float:
        """The mean loss over the global batch; before the commit, or without one, the last known loss (NaN: none).

        Computed by a collective when first read after the commit: read it on all ranks or on none. If the ranks have
        changed since, it is the mean over this rank's own samples. A step that was given up starts no collective.
        """
        if not self.committed:
            return self._steps.loss_before(self, "the step has not committed")
        if self._mean is None:
            try:
                self._mean = self._global_mean()
            except RoundBrokenError as error:
                if not self._steps.absorb(self, error):
                    raise
                self._mean = self.local_mean()  # the round has ended
        if self._mean is None:
            return self._steps.loss_before(self, "the ranks have changed, and this one had no samples")
        self._steps.knows_loss(self._mean, self.number if self._control is self._steps.control else None)
        return self._mean

    def later_loss(self) -> LaterLoss:
        """Behind `optimizer.step()`, after `want_loss()`: an object whose `read()` gives `loss` one step later, without
        waiting; on any rank, once. `None` where the ranks have changed since, also inside the step."""
        unknown = not self.committed or (self._mean is None and self._pending is None)
        if unknown and self._control is self._steps.control:
            raise ConfigError(
                "later_loss() of a step without one",
                hint="call want_loss() before backward(), and later_loss() after optimizer.step()",
            )
        return LaterLoss(self._steps, self._control, self._pending, self._mean, self.number)

    def _global_mean(self) -> float | None:
        control = self._control
        if control is not self._steps.control:
            return self.local_mean()  # the ranks have changed
        pending = self._pending if self._pending is not None else self._sum_losses()
        return pending.wait()[0] / control.world_size

    def _sum_losses(self) -> Pending:
        return self._control.start(Purpose.LOSS, [self.local_sum()])

    def local_sum(self) -> float:
        """This rank's weighted losses; their sum over ranks is W times the global mean."""
        return sum(float(loss) * weight for loss, weight in self._losses if weight)

    def local_mean(self) -> float | None:
        """The mean loss over this rank's own samples; None if it had none."""
        if self._count_here is not None and self._losses:
            own = self._count_here
            return sum(float(loss) for loss, weight in self._losses if weight) / own if own else None
        total = sum(weight for _, weight in self._losses)
        return self.local_sum() / total if total else None

    # ---- for Steps

    @property
    def known_mean(self) -> float | None:
        """The mean loss over the global batch, where that is known without a collective."""
        return self._mean

    def loss_terms(self) -> list[tuple[torch.Tensor, float]]:
        """Losses and factors whose products add up to :meth:`local_mean`."""
        if self._count_here is not None:
            own = self._count_here
            return [(loss, 1.0 / own) for loss, weight in self._losses if weight] if own else []
        total = sum(weight for _, weight in self._losses)
        return [(loss, weight / total) for loss, weight in self._losses if weight] if total else []

    def ready(self) -> None:
        """ConfigError unless the gradients are complete and right."""
        if self.committed:
            raise ConfigError("a second optimizer step in one session.step()", hint="open one step for each")
        if self.skipped:
            raise ConfigError("optimizer.step() after step.skip()", hint="do one of them")
        if not self._done:
            raise ConfigError(
                "optimizer.step() without step.backward(loss)",
                hint="call step.backward(loss) in place of loss.backward(), which would weight ranks wrongly",
            )
        if self._open_parts:
            raise ConfigError(
                "not all micro-batches were used before optimizer.step()", hint="do not leave the loop over them early"
            )
        self._check_complete()

    def begin_pass(self) -> None:
        """Only the next pass over the batch counts."""
        self._losses, self._done, self._normalized = [], set(), False
        self._mean = self._pending = self._count_here = None
        self._part = self.batch

    def mean_of_pass(self) -> torch.Tensor:
        """The mean loss of the completed pass over the global batch, the same on all ranks."""
        if self._mean is None:
            self._mean = self._global_mean()
        return torch.tensor(self._mean, dtype=torch.float64)

    def finite_evidence(self) -> list[torch.Tensor]:
        """Losses to check for NaN and infinity later, when it costs nothing."""
        return [loss for loss, weight in self._losses if weight and not self.skipped]


Returned = TypeVar("Returned")


class ManualStep(Step):
    """A step whose body is a framework's or a script's own loop, between ``session.begin_step()`` and ``end()``.

    There is no block that the end of a round could leave. So the step joins the next round in the very call that finds
    out that its own has ended. From then on a call of the model computes on this rank alone; ``backward``, ``clip``,
    ``skip`` and ``update`` do nothing, and ``end()`` returns False. The batch then comes again.

    Attributes:
        lost: Whether its round has ended, and what it computes is for nothing.
        ended: Whether ``end()`` was called.
    """

    def __init__(self, steps: Steps, batch: Batch | None) -> None:
        steps.replica.check(Use.MANUAL_STEP)
        super().__init__(steps, batch)
        self._driver = steps
        self.lost = self.ended = False
        self.__enter__()
        steps.replica.runner.intercept(self._call)

    def _call(self, through: Callable[..., Any], inputs: Any, named: Any) -> Any:
        def alone() -> Any:
            with self._driver.replica.aside():
                return self._driver.replica.module(*inputs, **named)

        return self._unless_lost(lambda: through(*inputs, **named), alone)

    def _unless_lost(self, act: Callable[[], Returned], otherwise: Callable[[], Returned]) -> Returned:
        if not self.lost:
            try:
                return act()
            except (RejoinError, TransientError, RuntimeError) as error:
                if not self._driver.closed(self, error):
                    self.end()
                    raise
                self.lost = True
        return otherwise()

    def _begin(self, part: Batch) -> None:
        if not self.lost:
            super()._begin(part)

    def backward(self, loss: torch.Tensor, count: float | None = None) -> None:
        self._unless_lost(lambda: super(ManualStep, self).backward(loss, count), lambda: None)

    def clip(self, max_norm: float) -> torch.Tensor:
        return self._unless_lost(lambda: super(ManualStep, self).clip(max_norm), lambda: torch.tensor(0.0))

    def skip(self) -> None:
        self._unless_lost(super().skip, lambda: None)

    def update(self) -> None:
        """``optimizer.step()``, unless the round has ended."""
        self._unless_lost(self._driver.update, lambda: None)

    def end(self) -> bool:
        """Whether the step counts; if not, the ranks have changed, and the next batch drawn is this one again.

        ConfigError if the step has neither made its update nor skipped it.
        """
        self._end(lambda: self._driver.closed(self, None))
        return self.committed

    def abandon(self) -> None:
        """The loop was left in the middle of the step: undo it."""
        self._end(lambda: self._driver.abandon(self))

    def _end(self, act: Callable[[], object]) -> None:
        if not self.ended:
            self.ended = True
            self._driver.replica.runner.intercept(None)
            act()


class LaterLoss:
    """The mean loss of a step over its global batch, while it is computed. It holds none of the step's data."""

    __slots__ = ("_control", "_mean", "_number", "_pending", "_steps")

    def __init__(
        self, steps: Steps, control: Control, pending: Pending | None, mean: float | None, number: int
    ) -> None:
        self._steps, self._control, self._pending, self._mean = steps, control, pending, mean
        self._number = number

    def read(self) -> float | None:
        """The loss, after a wait if necessary; any rank may read it at any time, once.

        None where the ranks have changed or lose each other: the next collective finds that out and handles it.
        ConfigError if another rank did something else in place of its step.
        """
        if self._control is not self._steps.control:
            return None
        mean, pending = self._mean, self._pending
        if mean is None and pending is not None:
            try:
                mean = pending.wait()[0] / self._control.world_size
            except RoundBrokenError as error:
                logger().info("loss.unknown", reason=str(error))
                return None
        self._steps.knows_loss(mean, self._number)
        return mean


# Closures given to ``optimizer.step()``: their passes are collectives, and belong before the update.
#
# Most of torch's optimizers call the closure once and then update, so the session calls it for them. LBFGS and foreign
# optimizers may call it again after they have changed parameters. Each call is then a whole pass over the batch and
# returns the mean loss over all ranks, so that all decide the same. In place, the optimizer's previous state is kept,
# and restored if a round ends in a pass.
Closure = Callable[[], Any]


class Before:
    """Parameters and state of an optimizer, to be restored."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._values = [each.detach().clone() for each in self._parameters]
        self._state = copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._values)
        load_exactly(self._optimizer, self._state)


class EveryStep:
    """How ranks come to one state that do so in each step: by the update itself."""

    open = False
    """Whether this rank has begun a step since the last synchronisation."""
    rare = False
    """Whether boundaries follow synchronisations, not each step."""

    def begin(self) -> None:
        """A step begins."""

    def made(self, step: Step, check: Callable[[], None]) -> bool:
        """After ``step``: whether all ranks hold one state now. ``check``: see :meth:`Recovery.check_gradients`."""
        return True

    def require_closed(self) -> None:
        """ConfigError between two synchronisations."""

    def undo(self) -> None:
        """The round has ended: go back to the last synchronisation."""

    def healed(self) -> None:
        """This rank has received the state of a peer."""

    def finish(self, check: Callable[[], None]) -> None:
        """The script has left its loop: all ranks come to one state."""


StepT = TypeVar("StepT", bound=Step)
_MOST_UNCHECKED = 64


class Steps:
    """Opens, commits and closes the steps of one model with one optimizer, in all rounds.

    ``sync`` brings ranks to one state that are not in each step. ``audit`` repeats passes.
    """

    sums_after_each_pass = True
    """Whether a wanted loss is summed after a backward pass; else when the block of the step ends."""

    def __init__(
        self, context: WorkerContext, replica: Replica, state: TrainingState, sync: EveryStep, audit: PassAudit | None
    ) -> None:
        self._context, self._feed, self._tracker = context, context.feed, context.tracker
        self.replica, self.position, self.sync, self._audit = replica, state.position, sync, audit
        self._optimizer, self._scheduler, self._average = state.optimizer, state.scheduler, state.average
        self._leading = next(iter(members_of(state.optimizer)))
        self.scaling = Scaling(state.scaler, state.optimizer, replica.anywhere)
        self.trainable = Trainable(replica.module, self._optimizer)
        seed = context.options.seed
        self._stream, self._sample_stream = seeds.key(seeds.STEP, seed), seeds.key(seeds.SAMPLE, seed)
        self._seed_all = seeds.seeder(state.device)
        self._epoch, self._epoch_stream = -1, 0
        # ---- of the round
        self._recovery: Recovery  # bound before the first step
        self.control, self.part = Control(), DataPart(0, 1)
        self._agreed = False
        """Whether all ranks of the round are known to train the same parameters."""
        self._schedule_count = advanced(self._scheduler)
        self.begun = 0
        """Steps of this round, whatever came of them."""
        # ---- of the present step
        self._current: Step | None = None
        self._own_lrs: list[tuple[dict[str, Any], Any]] = []
        self.updating = False
        """While an optimizer of the session is at work."""
        self.dirty = False
        """Between the optimizer's first change and the commit: the state is neither the old nor the new one."""
        self._before: dict[torch.optim.Optimizer, Before] = {}
        """The state before updates that collectives follow in the same step."""
        self._committing: tuple[Step, bool] | None = None
        """The last step that was to be committed, and whether with an update."""
        self._rolls = False
        """During an update that a peer has made before."""
        # ---- losses
        self._unchecked: list[torch.Tensor] = []
        self._nonfinite = False
        self._loss, self._substituted = math.nan, False
        for each in members_of(self._optimizer):
            each.register_step_pre_hook(self._before_update)
            each.register_step_post_hook(self._after_update)

    def bind(self, control: Control, recovery: Recovery) -> None:
        """A round begins, in which all ranks hold one state; ``recovery`` is what follows its end."""
        self.control, self.part, self._recovery = control, self.replica.part(control), recovery
        self.trainable.read_flags()
        self._agreed = False
        self._schedule_count = advanced(self._scheduler)
        self._unchecked.clear()
        self.begun = 0
        if self._audit is not None:
            self._audit.bind(control)

    @property
    def inside(self) -> bool:
        return self._current is not None

    @property
    def uncommitted(self) -> int | None:
        """The number of the open step, if it is not committed yet."""
        step = self._current
        return step.number if step is not None and not step.committed else None

    # ---- opening

    def begin(self, kind: Callable[[Steps, Batch | None], StepT]) -> StepT:
        """A step of this ``kind`` about the batch at hand."""
        batch = self._feed.batch
        if batch is None:
            self._recovery.make_change()
        elif batch.used:
            raise ConfigError("this batch has been committed already", hint="open one session.step() for each batch")
        step = kind(self, batch)
        if self._audit is not None:
            self._audit.begin(step.number)
        self.sync.begin()
        return step

    def opened(self, step: Step) -> None:
        if self._current is not None:
            raise ConfigError("session.step() inside another one", hint="end the first step before the next")
        self.begun += 1
        self._recovery.lost = None
        epoch, plan_check = self.position.cursor.epoch, self._feed.plan_check
        try:
            plan_check.at_step(epoch)
            self.replica.share_buffers()
        except RoundBrokenError as error:  # raised in the body: only there it can be absorbed
            self._recovery.lost = error
        self._current, self.updating = step, False
        self._tracker.step_begins(step.number)
        self.scaling.begin()
        self._follow()
        batch = step.batch
        self.replica.begin_step(counts=batch is None or batch.weight > 0.0)
        self._drop_gradients()
        if batch is None:
            self._seed_all(seeds.key(self.position.step, self.part.rank, start=self._stream))
        else:
            self._seed(batch)

    def lr(self, *, waits: bool = True) -> float | None:
        """The learning rate that the first parameter group is trained with, where it has one; unless it ``waits``,
        none of a device."""
        lr = self._leading.param_groups[0].get("lr")
        if not waits and isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
            return None
        return float(lr) * self._feed.lr_factor if isinstance(lr, float | int | torch.Tensor) else None

    def _follow(self) -> None:
        """Train what the script has frozen, unfrozen and regrouped since the last step."""
        trainable = self.trainable
        if self.replica.fitted and trainable.switched:
            self.replica.fit(self.control, trainable.switch())
            self._agreed = False
            trainable.read_flags()
        elif len(self._optimizer.param_groups) != trainable.groups:
            trainable.read_flags()

    def _drop_gradients(self) -> None:
        """Of all parameters, also those without optimizer: a gradient left over would be summed over the ranks again.

        ``zero_grad()`` of torch's optimizers takes many times as long because of its profiler record.
        """
        if type(self._optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self._optimizer.zero_grad(set_to_none=True)
        for parameter in self.trainable.parameters:
            parameter.grad = None

    # ---- in the body

    def begin_micro_batch(self, part: Batch) -> None:
        """Seed ``part`` with random numbers that do not depend on the number of ranks."""
        self.replica.begin_micro_batch(counts=part.weight > 0.0)
        self._seed(part)

    def _seed(self, part: Batch) -> None:
        if part.epoch != self._epoch:
            self._epoch, self._epoch_stream = part.epoch, seeds.key(part.epoch, start=self._sample_stream)
        self._seed_all(seeds.key(part.start, start=self._epoch_stream))

    def check_round(self) -> None:
        """RoundBrokenError if the round had ended when the body began."""
        if self._recovery.lost is not None:
            raise self._recovery.lost

    def check_trained(self) -> None:
        """Before a backward pass: all ranks train the same parameters. They may notice a change at different steps."""
        if not self._agreed:
            self.trainable.check_alike(self.control)
            self._agreed = True

    # ---- update and commit

    def update(self) -> None:
        """Step the optimizer, in the open step."""
        self._optimizer.step()

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        step = self._current
        if step is None:
            raise ConfigError("optimizer.step() outside session.step()", hint="wrap the step in `with session.step()`")
        changed = None
        if not self._rolls:
            closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._check(step)
                self._keep(optimizer)
            else:
                self.replica.check(Use.CLOSURE)
                changed = (optimizer,), {**kwargs, "closure": self._called(step, closure, optimizer)}
            self.scaling.before_update()
            self._prepare(step, updates=True)
        self._restore_lr()
        factor = self._feed.lr_factor
        if factor != 1.0:
            self._own_lrs = [(group, group["lr"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        self.dirty = self.updating = True
        return changed

    def _check(self, step: Step) -> None:
        """The gradients are complete, right, and of all ranks."""
        self.check_round()
        step.ready()
        if self.replica.fitted and self.trainable.switched:
            raise ConfigError(
                f"{self.trainable.switch()} inside a step", hint="freeze and unfreeze parameters between two steps"
            )
        if not self.replica.summed:
            self.trainable.read_flags()
            raise ConfigError(
                "gradients were not summed over the ranks: a parameter had none, or the loss is not of what"
                " session.wrap() returned",
                hint="call the wrapped model; if parameters are unused, ddp_options={'find_unused_parameters': True}",
            )
        self._recovery.check_gradients()

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what there was before an update that another pass may follow."""

    def _called(self, step: Step, closure: Closure, optimizer: torch.optim.Optimizer) -> Closure:
        """What the optimizer calls in place of the ``closure``."""
        foreign = not type(optimizer).__module__.startswith("torch.optim.")
        if not foreign and not isinstance(optimizer, torch.optim.LBFGS):
            with torch.enable_grad():
                loss = closure()
            self._check(step)
            return lambda: loss
        if self.scaling.scaler is not None:
            raise ConfigError(
                f"a GradScaler does not go with {type(optimizer).__name__}, which computes gradients during its update",
                hint="use bfloat16, which needs no scaler",
            )
        if self.replica.in_place:
            self._before = {optimizer: Before(optimizer)}

        def called() -> torch.Tensor:
            step.begin_pass()
            closure()
            self._check(step)
            return step.mean_of_pass()

        return called

    def _prepare(self, step: Step, *, updates: bool) -> None:
        """All ranks of a shard group commit ``step``, or none does: gradients stay until that is settled."""
        self._committing = step, updates
        if getattr(self._optimizer, "grad_scale", None) is not None:
            self.replica.check(Use.FUSED_SCALER)
        self.replica.commit_together(step.number)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_lr()
        self.updating = False
        if self._current is not None:
            self._updated(self._current)

    def _updated(self, step: Step) -> None:
        self._commit(step)

    def _restore_lr(self) -> None:
        for group, own in self._own_lrs:
            group["lr"] = own
        self._own_lrs = []

    def _commit(self, step: Step) -> None:
        if self._average is not None:
            self._average.update_parameters(self.replica.module)
        self._before, self.dirty, self.replica.prepared, self._committing = {}, False, 0, None
        self.position.step += 1
        self.position.lineage = self.position.generation
        step.committed = True
        batch, samples = step.batch, 0
        self._context.records.add(step, self.position.cursor, self.lr(waits=False))
        if batch is not None:
            batch.used = True
            self.position.cursor = batch.following or self.position.cursor
            samples = len(batch.ids) if step.counts else 0
        self._tracker.note_step(self.position.step, samples, self.position.cursor)
        if self.scaling.scaler is None:
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

    def pass_over(self, cursor: Cursor) -> None:
        """Commit a step without samples and without an update; ``cursor`` is behind its batch. All ranks do it."""
        self.position.step += 1
        self._context.records.add_passed(self.position.step, self.position.cursor, cursor)
        self.position.lineage, self.position.cursor = self.position.generation, cursor
        self._tracker.note_step(self.position.step, 0, cursor)
        self._advance_schedule()

    # ---- closing

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
        lost = self._recovery.lost
        if lost is not None:
            if not self.absorb(step, lost):
                raise lost
            return False
        if not step.committed:
            raise ConfigError("the step ended without optimizer.step()", hint="call it once inside session.step()")
        try:
            self._after_step(step)
        except (RoundBrokenError, RuntimeError) as broken:
            if not self.absorb(step, broken):
                raise
        return False

    def _after_step(self, step: Step) -> None:
        """Synchronise if ranks do it now and then; record, report and pass the boundary."""
        context = self._context
        if not self.sync.made(step, self._recovery.check_gradients):
            return
        context.record(step)
        context.report()
        boundaries = context.present.boundaries
        action = boundaries.after_step(self.position.step)
        if action is BoundaryAction.PAUSE:
            action = self._pause(boundaries)
        if action is BoundaryAction.STOP:
            boundaries.stop()
        elif action is BoundaryAction.RESTART:
            boundaries.restart()
        elif action is BoundaryAction.SWITCH:
            self._recovery.note_change()

    def _pause(self, boundaries: Boundaries) -> BoundaryAction:
        """All ranks wait until nobody asks for it any more, or for something else; what all do then."""
        context, action = self._context, BoundaryAction.PAUSE
        logger().info("session.paused", step=self.position.step)
        context.tracker.set_notes(paused=True)
        with context.tracker.during(Phase.WAITING):
            while action is BoundaryAction.PAUSE:
                pause(EVERY_S)
                context.report()
                context.tracker.moved()
                action = boundaries.turn()
        context.tracker.set_notes(paused=False)
        boundaries.begin_phase()
        logger().info("session.resumed", step=self.position.step)
        return action

    def absorb(self, step: Step, error: BaseException) -> bool:
        """Whether ``error`` was the end of a round, and is handled; behind the body if ``step`` is in it still."""
        if self._current is step:
            self._recovery.postpone(error)
            return True
        return self._recovery.absorb(step, error)

    def abandon(self, step: Step) -> None:
        """The script has left its loop in the middle of ``step``."""
        if self._current is step:
            self._current = None
            self._restore_lr()
            self.undo()

    def disown(self) -> None:
        """In a forked child: an open step is the parent's."""
        self._current = None

    # ---- the end of a round, or of the loop

    def undo(self) -> None:
        """Undo what an uncommitted step left behind: gradients, buffers, the scaler's stage.

        An incomplete update stays (:attr:`dirty`) unless the state before it was kept. So does a prepared one.
        """
        if self.replica.prepared:
            return
        if self._before:
            for each in self._before.values():
                each.restore()
            self._before, self.dirty = {}, False
        self._committing = None
        self._drop_gradients()
        self.replica.undo()
        self.scaling.reset()
        self._tracker.gave_up()

    def settle(self, *, committed: bool) -> Step | None:
        """A round ended when this rank was prepared: make the update too if a peer has ``committed`` it, else undo it.

        Returns the step if it was committed here.
        """
        if not self.replica.prepared or self._committing is None:
            return None
        self.replica.prepared, (step, updates) = 0, self._committing
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

    def finish(self) -> None:
        """The script has left its loop: all ranks come to one state."""
        self.sync.finish(lambda: self._recovery.check_gradients())  # there may have been no round

    # ---- losses

    def knows_loss(self, mean: float | None, number: int | None = None) -> None:
        """``number``: of the step whose mean over the global batch that is."""
        self._loss = self._loss if mean is None else mean
        if mean is not None and number is not None:
            self._context.records.know_loss(number, mean)
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


class MultiOptimizerSteps(Steps):
    """Steps with several optimizers: each updates when the script says so, and the end of the block commits them all.

    Another pass may follow an update, and fail: in place what was there before the first one is kept.
    """

    sums_after_each_pass = False

    def _keep(self, optimizer: torch.optim.Optimizer) -> None:
        if self.replica.in_place and optimizer not in self._before:
            self._before[optimizer] = Before(optimizer)

    def _updated(self, step: Step) -> None:
        step.updated = True


class Scaling:
    """Loss scaling for 16-bit floats inside a step: all that depends on how GradScaler keeps its state; or no scaler.

    The user calls ``optimizer.step()`` or ``scaler.step(optimizer)``; unscaling happens before it and ``update()``
    after it. A step whose gradients overflowed changes no parameter, yet counts as committed.

    ``anywhere``: ranks that hold shards may find overflows in different ones; this says whether any of them has. The
    scaler asks in whatever way the script unscales: torch does so only over the mesh of the first gradient.
    """

    def __init__(
        self,
        scaler: torch.amp.GradScaler | None,
        optimizer: torch.optim.Optimizer,
        anywhere: Callable[[bool], bool] | None = None,
    ) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer, self._anywhere = optimizer, anywhere
        self._states: Any = None
        if self.scaler is not None:
            torch_internals.require(torch_internals.LOSS_SCALING)
            if anywhere is not None:
                self.scaler.unscale_ = partial(_unscale_alike, self.scaler, anywhere)  # type: ignore[method-assign]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, outside: Sequence[torch.Tensor] = ()) -> None:
        """Unscale gradients once per step, also those of parameters ``outside`` the optimizer."""
        if self.scaler is None or self._state()["stage"] is not OptState.READY:
            return
        self.scaler.unscale_(self._optimizer)
        if not outside:
            return
        found, group = self._state()["found_inf_per_device"], SimpleNamespace(param_groups=[{"params": outside}])
        for device, overflow in torch_internals.unscaled(self.scaler, group).items():
            found[device] = torch.maximum(found[device], overflow) if device in found else overflow
        if self._anywhere is not None:
            _agree(found, self._anywhere)

    def before_update(self) -> None:
        """Right before the optimizer changes parameters: drop gradients that overflowed.

        A fused optimizer inside ``scaler.step`` unscales and skips by itself; its ``grad_scale`` says so.
        """
        if self.scaler is None or getattr(self._optimizer, "grad_scale", None) is not None:
            return
        self.unscale()
        if any(bool(found) for found in self._state()["found_inf_per_device"].values()):
            self._optimizer.zero_grad(set_to_none=True)

    def begin(self) -> None:
        self._states = None if self.scaler is None else torch_internals.scaler_states(self.scaler)

    def skipped(self) -> bool:
        """Whether ``scaler.step`` left the optimizer's step out, also if the script has called ``update()`` since."""
        if self.scaler is None:
            return False
        states = torch_internals.scaler_states(self.scaler)
        return self._states is not states or self._state()["stage"] is OptState.STEPPED

    def after_update(self) -> None:
        """Adapt the scale, unless the user did."""
        if self.scaler is not None and self._state()["found_inf_per_device"]:
            self.scaler.update()

    def reset(self) -> None:
        if self.scaler is not None:
            torch_internals.scaler_states(self.scaler).pop(id(self._optimizer), None)

    def _state(self) -> dict[str, Any]:
        assert self.scaler is not None, "asked only where there is one"
        return torch_internals.scaler_states(self.scaler)[id(self._optimizer)]


def _unscale_alike(
    scaler: torch.amp.GradScaler, anywhere: Callable[[bool], bool], optimizer: torch.optim.Optimizer
) -> None:
    type(scaler).unscale_(scaler, optimizer)
    _agree(torch_internals.scaler_states(scaler)[id(optimizer)]["found_inf_per_device"], anywhere)


def _agree(found: Mapping[torch.device, torch.Tensor], anywhere: Callable[[bool], bool]) -> None:
    overflow = anywhere(any(bool(each) for each in found.values()))
    for each in found.values():
        each.fill_(float(overflow))


Row = Sequence[int]
"""A number for each parameter."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``others`` hold another ``parameter`` than ``source`` (the first of ``count`` that differ)."""

    source: int
    others: tuple[int, ...]
    parameter: str
    count: int


def difference(names: Sequence[str], rows: Sequence[Row]) -> Difference | None:
    """How the ``rows`` of all ranks differ from the most common one (a tie: the lowest rank's). Pure."""
    whole = [tuple(row) for row in rows]
    most = Counter(whole)  # in rank order
    wanted = max(most, key=lambda row: most[row])
    others = tuple(rank for rank, row in enumerate(whole) if row != wanted)
    differing = [
        index for index in range(len(names)) if any(len(row) <= index or row[index] != wanted[index] for row in whole)
    ]
    if not others:
        return None
    first = names[differing[0]] if differing else "(their number)"
    return Difference(whole.index(wanted), others, first, len(differing))


class Comparison:
    """Compares the parameters of all ranks every few steps, so that differences are found, whatever causes them.

    Each parameter's number is taken after a step; a sum over all of them starts after the next step and is read after
    the one following. So nobody waits, and all ranks learn of a difference at the same point. Only then are the numbers
    gathered, to name the parameter and the ranks. Before a step that is audited they are compared at once, so that no
    wrong state is trained on there.

    Buffers are left out, since each rank moves its own, and so is what DistributedDataParallel ignores. The end of a
    round discards its comparison: the next round makes states equal anyway.

    ``heal`` sends the source's state to the others; None: the training stops, by DifferError on all ranks.
    ``whole``: these are all ranks, so the ledger notes the number of the state, also where a rank is alone. A shard's
    number is not noted: ranks with different shards would have different ledgers.
    """

    def __init__(
        self,
        control: Control,
        compared: Trainable,
        context: WorkerContext,
        heal: Callable[[Difference], None] | None,
        *,
        whole: bool = True,
    ) -> None:
        self._whole = whole
        checks = context.options.checks
        self._control, self._compared, self._heal = control, compared, heal
        self._records = context.records
        self._alone_every = checks.compare_every_steps if control.alone and whole else None
        self._tracker, self._node = context.tracker, context.environment.node
        self._every = 0 if control.alone else checks.compare_every_steps or 0
        self._audit_every = 0 if control.alone else checks.audit_every or 0
        self._taken: _Taken | None = None
        self._asked: tuple[_Taken, EqualityCheck] | None = None

    def after_step(self, step: int) -> None:
        if self._alone_every:
            self._note()  # a step later, when a device has it
            if step % self._alone_every == 0:
                self._take(step)
            return
        if self._audit_every and (step + 1) % self._audit_every == 0:
            self._at_once(step)
            return
        if not self._every:
            return
        if self._asked is not None:
            self._answer()
        if self._taken is not None:
            self._ask()
        if step % self._every == 0:
            self._take(step)

    def end(self, step: int) -> None:
        """After the last step: compare the present parameters and wait for the result."""
        if self._every or self._audit_every:
            self._at_once(step)

    def _at_once(self, step: int) -> None:
        if self._asked is not None:
            self._answer()
        self._take(step)
        self._ask()
        self._answer()

    def _take(self, step: int) -> None:
        named = self._compared.named()
        parameters = [each for _, each in named]
        names = [name for name, _ in named]
        self._taken = _Taken(step, names, digests.on_device(parameters), digests.begun(parameters))

    def _ask(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            self._asked = taken, EqualityCheck(self._control, Purpose.COMPARE, taken.digest())

    def _note(self) -> None:
        """A rank that is alone has nobody to compare with."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._records.add_digest(taken.step, taken.digest(), on_device=taken.on_device)

    def _answer(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        if asked[1].wait():
            if self._whole:
                self._records.add_digest(asked[0].step, asked[0].digest(), on_device=asked[0].on_device)
            return
        taken = asked[0]
        rows = [np.frombuffer(row, np.uint64).tolist() for row in self._control.gather_bytes(taken.bytes())]
        if len({row[0] for row in rows}) > 1:
            logger().warning("ranks.not_compared", reason="some train on a CUDA device, and others do not")
            self._every, self._audit_every, self._taken = 0, 0, None
            return
        found = difference(taken.names, [row[1:] for row in rows])
        if found is not None:
            self._taken = None
            nodes = [each.decode() for each in self._control.gather_bytes(self._node.encode())]
            self._meet(taken.step, found, sorted({nodes[rank] for rank in found.others}))

    def _meet(self, step: int, found: Difference, nodes: Sequence[str]) -> None:
        if self._control.rank == 0:
            self._tracker.differed()
        logger().error(
            "ranks.differed",
            step=step,
            parameter=found.parameter,
            parameters=found.count,
            ranks=list(found.others),
            nodes=nodes,
            source=found.source,
        )
        if self._heal is None:
            raise DifferError(
                f"after step {step} {_ranks(found.others)} another {found.parameter!r} than rank {found.source}"
                f" (the first of {found.count} such parameters)",
                hint="look for what changes parameters outside of optimizer.step(), or on some ranks only;"
                " on_difference='heal' goes on with the state that most ranks hold",
            )
        self._heal(found)


@dataclass(frozen=True, slots=True)
class _Taken:
    step: int
    names: Sequence[str]
    on_device: bool
    numbers: digests.Numbers

    def bytes(self) -> bytes:
        return np.array([self.on_device, *self.numbers()], np.uint64).tobytes()

    def digest(self) -> int:
        return xxhash.xxh3_64_intdigest(self.bytes())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} holds"
    return f"ranks {', '.join(map(str, ranks))} hold"


EVERY_S = 0.25
LONGEST_INTERVAL = 50
_SMOOTHING = 0.3
_MOST_AT_ONCE = 3.0
"""A single span counts for at most this multiple of the average."""
_RARE = 2.0**-20
"""What a rare wish adds to the number of ranks with a frequent one (a copy to saves, a pause to stops): fewer ranks
than its reciprocal add up to less than one."""
_RESTART = 2.0**-10
"""The same of a restart, which rank 0 alone wishes."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The wishes of one rank, or of all together."""

    stop: bool = False
    save: bool = False
    nonfinite: bool = False
    switch: bool = False
    """A planned change is known here; together: known to all ranks."""
    copy: bool = False
    """Shards are to be copied into memory that outlives the workers."""
    pause: bool = False
    """An operator wants all ranks to wait here."""
    restart: bool = False
    """An operator wants all workers to be started anew."""
    mark: int = 0
    """Must be equal on all ranks."""
    differ: bool = False
    """Together: whether the marks differ."""


def interval(boundary_s: float) -> int:
    """Boundaries between two sums when one boundary follows another after ``boundary_s`` seconds."""
    if boundary_s <= 0.0:
        return 1  # nothing is known yet
    return max(1, int(EVERY_S / max(boundary_s, EVERY_S / LONGEST_INTERVAL)))


class Consensus:
    """What all ranks decide at the same boundary: stop, save now, a non-finite loss.

    A boundary is a point that every rank passes equally often: the end of a step, a turn of an evaluation. An
    asynchronous sum is started at one boundary and read at the next, so the result is there before it is needed and all
    ranks act at the same boundary (a test for its arrival could differ between ranks). It starts about four times a
    second, every k-th boundary with k agreed in the sum itself, since each costs up to a millisecond. ``at_once``:
    boundaries are rare, and ranks agree at each.
    """

    def __init__(self, control: Control, clock: Clock = SYSTEM, *, at_once: bool = False) -> None:
        self._control, self._clock, self._at_once = control, clock, at_once
        self._count = 0
        self._next_start = 1
        self._pending: Pending | None = None
        self._mark = 0
        self._outdated = False
        self._last: float | None = None
        self.boundary_s = 0.0
        """This rank's smoothed seconds from boundary to boundary."""

    def boundary(self, observe: Callable[[], Flags], *, urgent: bool = False) -> Flags | None:
        """Pass a boundary; what all ranks agreed on here, or None if nothing was due.

        ``observe`` is called for this rank's wishes only when a sum starts. ``urgent`` makes a process that is alone
        act at once; several ranks can act only when all know.
        """
        self._measure()
        self._count += 1
        if self._control.alone:
            return self._alone(observe, urgent or self._at_once)
        agreed = self._finish() if self._pending is not None else None
        leaving = agreed is not None and (agreed.stop or agreed.switch or agreed.pause or agreed.restart)
        if (self._at_once or self._count >= self._next_start) and not leaving:
            self._start(observe())
            return self._finish() if self._at_once else agreed
        return agreed

    def agree(self, observe: Callable[[], Flags]) -> Flags:
        """What all ranks agree on here, at once; no sum may be under way."""
        if self._control.alone:
            return observe()
        self._start(observe())
        return self._finish()

    def _start(self, wishes: Flags) -> None:
        self._mark = wishes.mark
        stops = wishes.stop + wishes.restart * _RESTART + wishes.pause * _RARE
        saves = wishes.save + wishes.copy * _RARE
        values = [stops, saves, wishes.nonfinite, self.boundary_s, wishes.switch, wishes.mark]
        self._pending = self._control.start(Purpose.BOUNDARY, values)

    def reset(self) -> None:
        """A new kind of boundary begins on all ranks: measure afresh, and agree at the next one."""
        self._last, self.boundary_s = None, 0.0
        self._outdated = self._pending is not None
        self._next_start = self._count + 1

    def drain(self) -> Flags | None:
        """Wait for the pending sum, if any; all ranks are at the same boundary, so all or none have one."""
        return self._finish() if self._pending is not None else None

    def _alone(self, observe: Callable[[], Flags], urgent: bool) -> Flags | None:
        if self._count < self._next_start and not urgent:
            return None
        self._next_start = self._count + interval(self.boundary_s)
        return observe()

    def _finish(self) -> Flags:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no sum is under way")
        stop, saves, nonfinite, seconds, switch, marks = pending.wait()
        world = self._control.world_size
        if not self._outdated:
            self._next_start = self._count - 1 + interval(seconds / world)
        self._outdated = False
        flags = Flags(stop >= 1, saves >= 1, nonfinite > 0, switch == world, saves % 1.0 > 0)
        orders = stop % 1.0
        flags = replace(flags, restart=orders >= _RESTART, pause=orders % _RESTART > 0)
        return replace(flags, differ=marks != world * self._mark)

    def _measure(self) -> None:
        now = self._clock.monotonic()
        if self._last is not None:
            self.boundary_s = smoothed(self.boundary_s, now - self._last)
        self._last = now


def smoothed(average_s: float, span_s: float) -> float:
    """The average after one more span. A long pause (a checkpoint) moves it little, a lasting change soon."""
    if not average_s:
        return span_s
    return average_s + _SMOOTHING * (min(span_s, _MOST_AT_ONCE * average_s) - average_s)


_UNSAVED = "the last checkpoint could not be saved: what was trained since the newest one is lost"


class BoundaryAction(StrEnum):
    """What all ranks do after a boundary."""

    GO_ON = "go_on"
    STOP = "stop"
    SWITCH = "switch"
    """Leave the round for the one of a planned change."""
    PAUSE = "pause"
    """Wait here until nobody asks for it any more."""
    RESTART = "restart"
    """Leave as for a stop, to be started anew."""


class Boundaries:
    """Boundaries of ranks without a model yet: they only stop together."""

    def __init__(self, control: Control, context: WorkerContext, *, rare: bool = False) -> None:
        self._consensus, self._context = Consensus(control, at_once=rare), context
        self._at_once = rare or control.alone
        self._crossing = self._asked_at = self._saved_at = 0
        """The number of this boundary, of the last one that wishes were collected at, of the last one that saved."""

    @property
    def span_s(self) -> float:
        return self._consensus.boundary_s

    def after_step(self, step: int) -> BoundaryAction:
        return self.cross()

    def cross(self, *, saved: bool = False) -> BoundaryAction:
        """Pass a boundary; what all ranks do now. ``saved``: this state has just been saved."""
        self._crossing += 1
        before = self._asked_at
        agreed = self._consensus.boundary(self._wishes, urgent=self._context.signals.requested is not None)
        if agreed is None:
            return BoundaryAction.GO_ON
        asked_at = self._asked_at if self._at_once else before
        return self._follow(agreed, saved=saved or self._saved_at >= asked_at)  # a save since then has met the wish

    def _wishes(self) -> Flags:
        self._asked_at = self._crossing
        return Flags(stop=self._context.signals.requested is not None)

    def _follow(self, agreed: Flags, *, saved: bool) -> BoundaryAction:
        return BoundaryAction.STOP if agreed.stop else BoundaryAction.GO_ON

    def turn(self) -> BoundaryAction:
        """A boundary of ranks that wait: as :meth:`cross`, but they agree at once."""
        self._crossing += 1
        return self._follow(self._consensus.agree(self._wishes), saved=False)

    def begin_phase(self) -> None:
        """Boundaries of another kind follow, on all ranks."""
        self._consensus.reset()

    def end(self) -> None:
        """The last boundary has been passed."""
        self._consensus.drain()

    def save_last(self, status: str) -> None:
        """Save unsaved work, all ranks together, before they leave."""

    def stop(self) -> NoReturn:
        """All ranks leave here, with a checkpoint."""
        context = self._context
        context.signals.note_stop()
        logger().info("session.stopping", step=context.position.step)
        self.save_last("stopped")
        context.left_as = "stopped"
        raise SystemExit(context.signals.exit_code)

    def restart(self) -> None:
        """All ranks leave as for a stop, so that others are started in their place."""

    # ---- after the end of a round

    def save_due(self, step: int) -> None:
        """Save after ``step`` if due, when the round ended between the step and its boundary."""

    def refuse_nonfinite(self) -> None:
        """A state with non-finite losses must not reach the next round and other ranks.

        Ranks that learned of it at the last boundary have ended; this one did not learn it because they ended.
        """


class StepBoundaries(Boundaries):
    """Boundaries of ranks that train, in one round; where ``steps.sync`` is rare they follow synchronisations."""

    def __init__(
        self,
        control: Control,
        context: WorkerContext,
        saver: Saver,
        steps: Steps,
        comparison: Comparison,
        recovery: Recovery,
    ) -> None:
        super().__init__(control, context, rare=steps.sync.rare)
        self._control, self._saver, self._steps, self._comparison = control, saver, steps, comparison
        self._tracker, self._plan_check, self._recovery = context.tracker, context.feed.plan_check, recovery
        self._fatal = context.options.checks.nonfinite == "raise"
        self._rank0, self._refused = control.rank == 0, False
        self._deaf = False
        """Whether a restart was refused in this round."""
        page = context.tracker.page.path
        self._order: Path | None = page.with_suffix(ORDER_SUFFIX) if self._rank0 and page is not None else None

    def after_step(self, step: int) -> BoundaryAction:
        saver = self._saver
        self._comparison.after_step(step)
        saver.note_ended_saves()
        self._refused |= saver.refused()
        saved = saver.due_by_step(step)
        if saved:
            self._save()
        saver.copy_if_due()
        saver.prepare()
        return self.cross(saved=saved)

    def turn(self) -> BoundaryAction:
        self._saver.note_ended_saves()
        self._refused |= self._saver.refused()
        return super().turn()

    def _wishes(self) -> Flags:
        self._asked_at = self._crossing
        signals, on_demand = self._context.signals, self._rank0 and self._saver.due_on_demand()
        replay = self._context.options.replay
        order = self._ordered()
        if self._rank0:
            self._tracker.show_lr(self._steps.lr)
        return Flags(
            stop=(not self._recovery.led and signals.requested is not None)
            or (replay is not None and self._steps.position.step >= replay.until),
            save=self._saver.due_by_time() or on_demand or signals.save_requested,
            nonfinite=self._own_nonfinite(),
            switch=self._recovery.knows_change(),
            copy=self._saver.wants_copy(),
            pause=order == RunOrder.PAUSE,
            restart=order == RunOrder.RESTART and self._saver.possible and not self._deaf,
            mark=self._plan_check.fingerprint() ^ self._context.records.mark(),
        )

    def _ordered(self) -> str:
        """The order that this rank's agent has for all ranks. A restart is of one round: this file may be older."""
        try:
            words = self._order.read_text(encoding="ascii", errors="replace").split() if self._order else []
        except OSError:
            return ""
        if words[:1] == [RunOrder.RESTART] and words[1:] != [str(self._tracker.pulse.round)]:
            return ""
        return words[0] if words else ""

    def _follow(self, agreed: Flags, *, saved: bool) -> BoundaryAction:
        if agreed.differ:
            self._plan_check.compare()
            self._context.records.compare(self._control)
        if agreed.nonfinite:
            self._meet_nonfinite()
        if agreed.stop:
            return BoundaryAction.STOP
        if agreed.save and not saved:
            if self._rank0 and not self._saver.possible:  # nothing is due by time then: a signal asked for it
                logger().warning("checkpoint.impossible", reason="the session has no checkpoint_dir")
            self._save()
        if agreed.copy:
            self._saver.copy_shards()
        if agreed.switch:
            return BoundaryAction.SWITCH
        if agreed.restart:
            return BoundaryAction.RESTART
        return BoundaryAction.PAUSE if agreed.pause else BoundaryAction.GO_ON

    def _save(self) -> None:
        self._saved_at = self._crossing
        self._context.signals.save_requested = False
        if self._rank0:
            self._refused |= isinstance(self._saver.attempt(), NonFiniteError)
        else:
            self._tracker.peer_saves()
            self._saver.write_share()

    def _own_nonfinite(self) -> bool:
        return self._refused or self._steps.nonfinite()

    def _meet_nonfinite(self) -> None:
        step = self._steps.position.step
        self._tracker.count_nonfinite()
        if self._fatal:
            raise NonFiniteError(
                f"the loss or a parameter became NaN or infinite by step {step}",
                hint="lower the learning rate, clip gradients, or look for bad samples; nonfinite='warn' goes on",
            )
        logger().warning("loss.nonfinite", step=step)
        self._refused = False
        self._steps.forgive()

    def end(self) -> None:
        super().end()
        self._comparison.end(self._steps.position.step)

    def restart(self) -> None:
        """Returns, and training goes on, where the state cannot be saved: its steps would be lost."""
        context = self._context
        logger().info("session.restarting", step=context.position.step)
        if self._made_durable()[0]:
            self._deaf = True
            logger().error("restart.refused", step=context.position.step, reason="the state cannot be saved")
            return
        context.signals.note_stop()
        context.report_end("stopped")
        context.left_as = "restarted"
        context.tracker.set_notes(restarted=True)
        raise SystemExit(EXIT_RESTARTED)

    def _made_durable(self) -> tuple[bool, bool, BaseException | None]:
        """Whether the last state is saved nowhere, for all ranks; whether that is not the storage's fault; and why."""
        problem = self._saver.make_durable()
        refused = isinstance(problem, StorageError)
        flags = [float(problem is not None), float(problem is not None and not refused)]
        unsaved, unsound = map(bool, self._control.sum(Purpose.STOP, flags)[:2])
        return unsaved, unsound, problem

    def save_last(self, status: str) -> None:
        """SystemExit 73 on all if rank 0 cannot and the job requires it, or if the fault is not the storage's."""
        context = self._context
        unsaved, unsound, problem = self._made_durable()
        if unsaved:
            fails = unsound or context.options.saving.require_last_save
            logger().error("session.unsaved", step=context.position.step, reason=_UNSAVED, fails=fails)
            if fails:
                raise SystemExit(EXIT_CANNOT_WRITE) from problem
        context.report_end(status)

    # ---- after the end of a round

    def save_due(self, step: int) -> None:
        if self._saver.alone and self._saver.due_by_step(step) and self._saver.unsaved:
            self._save()

    def refuse_nonfinite(self) -> None:
        if self._fatal and self._own_nonfinite():
            self._meet_nonfinite()


Report = Callable[[Position, float], None]
"""Gets the position and the smoothed seconds per step at each step; must not block."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """A process as one rank of one round; made for each round, never changed."""

    group: groups.Group
    boundaries: Boundaries

    @property
    def control(self) -> Control:
        return self.group.control


class WorkerContext:
    """What a process has from the opening of its session to the end, across rounds.

    ``rank_context`` is that of the present round: the only thing here that rounds change.
    """

    def __init__(
        self,
        options: SessionOptions,
        environment: WorkerEnvironment,
        report: Report | None,
        placement: Placement,
        position: Position,
        tracker: HeartbeatReporter,
        signals: Signals,
        timeouts: groups.FormTimeouts,
        free: Callable[[int], object],
    ) -> None:
        self.timeouts, self.free = timeouts, free
        self.options, self.environment, self.placement, self.position = options, environment, placement, position
        self.tracker, self.signals, self._report = tracker, signals, report
        self.rank_context: RankContext | None = None
        """None before the first round."""
        self.left_as = ""
        """How this process leaves on request: ``stopped`` or ``restarted``."""
        self.watching: list[Callable[[], object]] = []
        """What the script wants called in each new round, when the state is whole."""
        # Only this package's agents ensure that one name is one job.
        job = environment.run_id if environment.memory else None
        self.owner = Owner(environment.run_name, job)
        self.manager = self._manager()
        self.ledger = Ledger(environment)
        without = options.replay.without if options.replay is not None else ()
        self.feed = DataFeed(position, placement.device, options.allow_changed, tracker, environment.node, without)
        self.records = StepRecords(options.directory, environment, self.feed, options.seed)
        logs.bind(run=environment.run_id, node=environment.node, role="worker")
        seeds.seeder(placement.device)(seeds.key(seeds.START, options.seed))

    def _manager(self) -> CheckpointManager | None:
        """One rank per node looks for checkpoints, and rank 0 writes them."""
        environment, options = self.environment, self.options
        looks = environment.local_rank == 0 or (environment.rank == 0 and not environment.in_place)
        if options.directory is None or not looks:
            return None
        return CheckpointManager(options.directory, options.retention, options.saving.on_event, owner=self.owner)

    @property
    def present(self) -> RankContext:
        if self.rank_context is None:
            raise ConfigError(
                "in place a process has no rank before its model is ready", hint="ask after session.wrap()"
            )
        return self.rank_context

    @property
    def span_s(self) -> float:
        """Smoothed seconds per step; 0 before the first."""
        return self.rank_context.boundaries.span_s if self.rank_context is not None else 0.0

    def arrive(self, group: groups.Group) -> None:
        """A round has been formed: show this process's rank in it."""
        formation = group.formation
        self.tracker.set_rank(formation.rank, formation.world_size, formation.round, self.placement.device)
        logs.bind(rank=formation.rank)

    def leave(self) -> None:
        self.feed.close()
        self.records.close()
        self.ledger.close()
        if self.manager is not None:
            self.manager.close()
        if self.rank_context is not None:
            groups.leave(self.rank_context.group)

    # ---- reports

    def report(self) -> None:
        """Report progress to the agent."""
        if self._report is not None:
            self._report(self.position, self.span_s)

    def record(self, step: Step, **where: int) -> None:
        """Write a committed step to the ledger, once: its round may end before the boundary after it."""
        if step.recorded or not self.ledger.enabled:
            return
        step.recorded = True
        self.ledger.write("step", **where, **self.entry(step))

    def entry(self, step: Step) -> dict[str, Any]:
        """What the ledger says of a committed step."""
        batch = step.batch
        return {
            "step": step.number,
            "epoch": batch.epoch if batch is not None else self.position.cursor.epoch,
            "samples": [int(each) for each in batch.ids] if batch is not None and step.counts else [],
            "global_samples": batch.global_size if batch is not None else 0,
            "loss": step.local_mean(),
        }

    def report_save(self, committed: Committed) -> None:
        step = committed.entry.step
        self.records.seal(step)
        self.ledger.write("checkpoint", step=step, name=committed.name, duration_s=committed.duration_s)

    def report_end(self, status: str) -> None:
        self.ledger.write("closed", step=self.position.step, status=status, skipped_samples=self.feed.tally.total)
