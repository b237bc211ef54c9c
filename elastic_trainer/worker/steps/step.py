"""One training step: from its micro-batches to the gradient of the mean over the global batch.

*Runs in* the worker's main thread.
*Fails by* ConfigError for a step that would train wrongly; errors of the body pass through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

import torch

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, Pending, Purpose
from elastic_trainer.worker.model.loss_scaling import Scaling
from elastic_trainer.worker.model.replica import Replica
from elastic_trainer.worker.model.trainable import Trainable
from elastic_trainer.worker.model.tree import TreeReduction
from elastic_trainer.worker.state.training_state import Position


class StepHost(Protocol):
    """What a step needs of its training (:class:`~elastic_trainer.worker.steps.commit.Steps`)."""

    control: Control
    position: Position
    replica: Replica
    scaling: Scaling
    several: bool
    trainable: Trainable

    def opened(self, step: Step) -> None: ...

    def closed(self, step: Step, error: BaseException | None) -> bool: ...

    def absorb(self, step: Step, error: BaseException) -> bool: ...

    def check_round(self) -> None: ...

    def agree(self) -> None: ...

    def begin_micro_batch(self, part: Batch) -> None: ...

    def knows_loss(self, mean: float | None) -> None: ...

    def loss_before(self, step: Step, reason: str) -> float: ...


def _mean_of(losses: Pending, control: Control) -> float:
    """The mean over the global batch, from the sum of all ranks' weighted losses."""
    return losses.wait()[0] / control.world_size


class LaterLoss:
    """The mean loss of a step over its global batch, while it is computed. It holds none of the step's data."""

    __slots__ = ("_control", "_mean", "_pending", "_steps")

    def __init__(self, steps: StepHost, control: Control, pending: Pending | None, mean: float | None) -> None:
        self._steps, self._control, self._pending, self._mean = steps, control, pending, mean

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
                mean = _mean_of(pending, self._control)
            except RoundBrokenError as error:
                logger().info("loss.unknown", reason=str(error))
                return None
        self._steps.knows_loss(mean)
        return mean


class Step:
    """A step in progress, then its result. ``committed`` says whether it counts."""

    def __init__(self, steps: StepHost, batch: Batch | None) -> None:
        self._steps, self._batch, self._control = steps, batch, steps.control
        self._part = batch
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._mean: float | None = None
        self._wanted = False
        self._pending: Pending | None = None
        """The sum of the losses, started after the last backward pass."""
        self._count_here: float | None = None
        """The items counted on this rank, if losses are sums."""
        self._normalized = False
        self._done: set[int] = set()
        """First positions of the micro-batches that have had a backward pass."""
        self._open_parts = False
        self.committed = self.recorded = self.skipped = self.updated = False
        self.generation, self.rank, self.world_size = (
            steps.position.generation,
            steps.control.rank,
            steps.control.world_size,
        )
        self.counts = steps.replica.part(steps.control).first
        """Whether this rank's samples count: others may have computed with the same ones."""
        self.number = steps.position.step + 1

    def __enter__(self) -> Step:
        self._steps.opened(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._steps.closed(self, error)

    def micro_batches(self, batch: Batch | None = None) -> Iterator[Batch]:
        """The parts of ``batch`` to compute one after another; the last one averages gradients over ranks."""
        whole = self._batch
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
        self._steps.check_round()
        if self._done and (count is None) != (self._count_here is None):
            raise ConfigError("backward(loss, count) for some micro-batches only", hint="say the count for all or none")
        self._steps.replica.before_backward()
        self._steps.agree()
        part, replica = self._part, self._steps.replica
        if part is not None and part.outdated:
            raise ConfigError(
                "the loss is of data read before the ranks changed, and this rank's part of the batch is another now",
                hint="read batch.x, batch.y or batch.data again for each session.step(), or draw the batch anew",
            )
        fraction = self._fraction(part) if replica.tree is not None else 1.0
        weight = fraction if part is None or replica.tree is not None else part.weight
        self._done.add(0 if part is None else part.start)
        self._complete()
        pending = self._pending = None
        if count is not None:
            weight = self._count(float(count), counts=weight > 0.0)
            if not self._open_parts:
                counted = Control() if replica.apart else self._control
                pending = counted.start(Purpose.COUNT, [self._count_here or 0.0])
        self._losses.append((loss.detach(), weight))
        factor = weight * replica.share
        replica.backward(self._steps.scaling.scaled(loss if factor == 1.0 else loss * factor))
        if replica.tree is not None:
            self._grow(replica.tree, fraction, loss.detach() * weight)
        if pending is not None:
            self._normalize(pending.wait()[0] / replica.part(self._control).alike)
        if self._wanted and not self._open_parts and self._mean is None and not self._steps.several:
            # After the pass: it has just synchronised the ranks, and its kernels are queued on the device.
            self._pending = self._sum_losses()

    def sum_wanted_loss(self) -> None:
        """All passes through several models are made."""
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
        steps, replica, batch = self._steps, self._steps.replica, self._batch
        steps.check_round()
        if batch is None or self._done:
            raise ConfigError(
                "step.pipeline() without a batch, or a second time",
                hint="draw with session.batches(..., micro_batch_size=...), and call it once in each step",
            )
        replica.before_backward()
        steps.agree()
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
            found[number] = value.detach(), weights[number] * replica.stands_for
            return steps.scaling.scaled(value * (weights[number] * replica.share))

        if not replica.stands_for:
            steps.scaling.scaled(torch.zeros((), device=given[0][0].device))  # a scaler begins with its first loss
        replica.run(schedule, given, loss_of)
        self._done = {part.start for part in parts}
        self._losses = [found[number] for number in sorted(found)]
        if pending is not None:
            self._normalize(pending.wait()[0] / replica.part(self._control).alike)
        if self._wanted:
            self._pending = self._sum_losses()

    def _count(self, count: float, *, counts: bool) -> float:
        """Add ``count``; returns the factor for the sum until the count of the global batch is known."""
        if not math.isfinite(count) or count < 0:
            raise ConfigError(
                f"backward(loss, count) with a count of {count:g}", hint="count the items that the loss sums"
            )
        if self._normalized:
            raise ConfigError("a second backward(loss, count) of one batch", hint="add the losses up first")
        self._count_here = (self._count_here or 0.0) + (count if counts else 0.0)
        replica = self._steps.replica
        world = 1 if replica.tree is not None or replica.apart else replica.part(self._control).world
        return world / self._items if counts else 0.0

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

    def _fraction(self, part: Batch | None) -> float:
        """The share of the micro-batch in the global batch, the same at any number of ranks."""
        if part is None or (part.number is None and part.weight):
            raise ConfigError(
                "reduction='tree' adds up micro-batches",
                hint="draw with session.batches(..., micro_batch_size=...), and loop over step.micro_batches()",
            )
        if part.start in self._done:
            raise ConfigError("a second backward pass of one micro-batch", hint="add the losses up first")
        return len(part.ids) / part.global_size

    def _complete(self) -> None:
        """ConfigError if the last micro-batch is done and another one had no backward pass."""
        if self._batch is None or self._part is self._batch:
            return
        parts = self._batch.micro_batches
        if not self._open_parts and len(self._done) < len({part.start for part in parts}):
            raise ConfigError(
                "a micro-batch had no backward pass, so the gradient would lack its samples",
                hint="call step.backward(loss) for each, with a loss of zero where nothing counts",
            )

    def _grow(self, tree: TreeReduction, fraction: float, loss: torch.Tensor) -> None:
        part = self._part
        if part is None or part.number is None:
            tree.discard()
        else:
            tree.capture(part.number, fraction, loss)
        if not self._open_parts and self._batch is not None:
            tree.combine(self._batch.parts)
            self._mean = tree.loss

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over all parameters; the norm before."""
        self._steps.scaling.unscale(self._steps.trainable.outside)
        return self._steps.replica.clip(max_norm)

    def skip(self) -> None:
        """Make no update on purpose, on all ranks alike: the step commits without one when it ends.

        Its samples count as used and the schedule advances. ConfigError if another rank is in another call of all
        ranks; one that computes gradients instead waits for this one, until the agent ends both as hung: decide by
        what all ranks know, such as ``session.all_reduce(flag)``.
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
        self._steps.knows_loss(self._mean)
        return self._mean

    def later_loss(self) -> LaterLoss:
        """:attr:`loss`, to be read a step later without a wait.

        After the commit, and :meth:`want_loss` before; else ConfigError, unless the ranks have changed since.
        """
        unknown = not self.committed or (self._mean is None and self._pending is None)
        if unknown and self._control is self._steps.control:
            raise ConfigError(
                "later_loss() of a step without one",
                hint="call want_loss() before backward(), and later_loss() after optimizer.step()",
            )
        return LaterLoss(self._steps, self._control, self._pending, self._mean)

    def _global_mean(self) -> float | None:
        control = self._control
        if control is not self._steps.control:
            return self.local_mean()  # the ranks have changed
        pending = self._pending if self._pending is not None else self._sum_losses()
        return _mean_of(pending, control)

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

    @property
    def batch(self) -> Batch | None:
        """What the step is about, if it was drawn with ``session.batches``."""
        return self._batch

    # ---- for Steps

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
        self._complete()

    def again(self) -> None:
        """Only the next pass over the batch counts."""
        self._losses, self._done, self._normalized = [], set(), False
        self._mean = self._pending = self._count_here = None
        self._part = self._batch

    def mean_of_pass(self) -> torch.Tensor:
        """The mean loss of the completed pass over the global batch, the same on all ranks."""
        if self._mean is None:
            self._mean = self._global_mean()
        return torch.tensor(self._mean, dtype=torch.float64)

    def finite_evidence(self) -> list[torch.Tensor]:
        """Losses to check for NaN and infinity later, when it costs nothing."""
        return [loss for loss, weight in self._losses if weight and not self.skipped]
