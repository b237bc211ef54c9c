"""What a training script talks to: one context manager around a training loop that then survives.

::

    with Session(checkpoint_dir="runs/a") as session:
        model = session.wrap(model, optimizer=optimizer)          # moves, resumes, averages gradients
        for batch in session.batches(dataset, global_batch_size=256, epochs=10):
            with session.step() as step:
                step.backward(loss_fn(model(batch.x), batch.y))
                optimizer.step()

The same script runs alone (``python script.py``) and under any torchrun rendezvous backend.

*Runs in* the main thread of a worker process. *Owns* the process groups, the signal handlers and the ledger, from
``__enter__`` to ``__exit__``.
*Fails by* ConfigError and DataError for what the script asks wrongly, StorageError and CheckpointError for what cannot
be saved or resumed, RoundBrokenError when a peer is lost; SystemExit 143 when stopped, 73 when the last save failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch
import torch.distributed as dist
from torch import nn

from elastic_trainer import settings
from elastic_trainer.checkpoint import CheckpointManager, Committed, EventSink, Retention
from elastic_trainer.data.plan import EpochPlan, Ids
from elastic_trainer.data.sampler import Batch, Collate, Fetcher, Sampler
from elastic_trainer.errors import (
    EXIT_CANNOT_WRITE,
    CheckpointError,
    ConfigError,
    ElasticTrainerError,
    NonFiniteError,
)
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry import logs
from elastic_trainer.worker import device, evaluation, seeds
from elastic_trainer.worker import group as groups
from elastic_trainer.worker.consensus import Consensus, Flags
from elastic_trainer.worker.control import Control, Purpose
from elastic_trainer.worker.fields import check_fields
from elastic_trainer.worker.ledger import Ledger
from elastic_trainer.worker.link import EnvironmentLink, Link, Progress
from elastic_trainer.worker.replica import Replica, check_optimizer
from elastic_trainer.worker.resume import Origin, restore
from elastic_trainer.worker.saving import Cadence, Saver
from elastic_trainer.worker.scaling import Scaling
from elastic_trainer.worker.signals import Signals
from elastic_trainer.worker.state import Position, Stateful, TrainingState, check_part, reseed
from elastic_trainer.worker.steps import Step, Steps

GROUP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
_STOP_BOUNDARIES = 4


class Session:
    """See the module. ``checkpoint_dir`` None: nothing is saved. ``nonfinite``: ``raise`` or ``warn``.

    ``allow_changed`` names fields (length, global_batch, micro_batch, seed, shuffle) that a resumed job may have
    changed. ``stop_timeout_s`` bounds how long the ranks may take to agree to stop.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path | None = None,
        seed: int = 0,
        device: str = "auto",
        checkpoint_every_steps: int | None = None,
        checkpoint_every_s: float | None = 60.0,
        keep_last: int = 3,
        *,
        retention: Retention | None = None,
        allow_changed: Collection[str] = (),
        nonfinite: str = "raise",
        stop_timeout_s: float = STOP_TIMEOUT_S,
        group_timeout_s: float = GROUP_TIMEOUT_S,
        on_checkpoint_event: EventSink | None = None,
        link: Link | None = None,
    ) -> None:
        if seed < 0:
            raise ConfigError(f"seed is {seed}", hint="it must not be negative")
        if nonfinite not in ("raise", "warn"):
            raise ConfigError(f"nonfinite is {nonfinite!r}", hint="use 'raise' or 'warn'")
        self._directory = Path(checkpoint_dir) if checkpoint_dir is not None else None
        self._retention = retention if retention is not None else Retention(keep_last=keep_last)
        self._cadence = Cadence(checkpoint_every_steps, checkpoint_every_s)
        self._seed, self._asked_device, self._allow_changed = seed, device, frozenset(allow_changed)
        self._nonfinite_fatal, self._stop_timeout_s = nonfinite == "raise", stop_timeout_s
        self._group_timeout_s, self._on_checkpoint_event = group_timeout_s, on_checkpoint_event
        self.environment = settings.worker_environment()
        self._link: Link = link if link is not None else EnvironmentLink(self.environment)
        self._ledger = Ledger(self.environment)
        self._position = Position()
        self._user: dict[str, Stateful] = {}
        self._pending: dict[str, Any] = {}
        self._group: groups.Group | None = None
        self._state: TrainingState | None = None
        self._origin = Origin()
        self._fields: dict[str, Any] = {}
        self._batch: Batch | None = None
        self._in_epochs = self._stopped = self._save_failed = False

    # ---- opening and closing

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            logs.configure()
        self._signals = Signals(self._patience_s, lambda: self._link.broken(self.round))
        self._signals.open()
        try:
            self._form()
            self._manager = self._checked_manager()
        except BaseException:
            self._abandon()
            raise
        return self

    def _form(self) -> None:
        formation = self._link.formation()
        self._placement = device.take(self._asked_device, formation.local_rank, formation.world_size)
        self._group = groups.form(formation, self._placement, self._group_timeout_s)
        self._consensus = Consensus(self._group.control)
        self._position.generation = formation.round
        logs.bind(run=self.environment.run_id, node=self.environment.node, role="worker", rank=formation.rank)
        seeds.seed_all(seeds.key(seeds.START, self._seed), self._placement.device)

    def _checked_manager(self) -> CheckpointManager | None:
        """One rank of each node looks for checkpoints; rank 0 must be able to write them."""
        manager: CheckpointManager | None = None
        problem: ElasticTrainerError | None = None
        if self._directory is not None and (self.is_rank0 or self.local_rank == 0):
            manager = CheckpointManager(self._directory, self._retention, self._on_checkpoint_event)
        if manager is not None and self.is_rank0:
            try:
                manager.check_writable()
                manager.sweep()
            except CheckpointError as error:
                problem = error
        self._control.agree(problem)
        self._saver = Saver(manager if self.is_rank0 else None, self._cadence, self._on_saved)
        return manager

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stopped or error is not None:
            self._abandon()
            return
        try:
            self._finish()
        except BaseException:
            self._abandon()
            raise
        self._close("done")

    def _finish(self) -> None:
        """All ranks have come to the end: save what is not saved, and leave together."""
        self._signals.agreed()
        self._consensus.drain()
        if self._state is not None:
            self._save_last("done")
        self._control.sum(Purpose.FINISH)

    def _save_last(self, status: str) -> None:
        problem: Exception | None = None
        if self._saver.unsaved(self._trained):
            problem = self._saver.attempt(self._trained, self.world_size, self._fields)
        if self._control.sum(Purpose.STOP, [float(problem is not None)])[0]:
            logs.logger().error("session.failed", reason="the last checkpoint could not be saved")
            raise SystemExit(EXIT_CANNOT_WRITE) from problem
        self._ledger.write("closed", step=self.step_number, status=status)

    def _close(self, status: str) -> None:
        self._link.close(status)
        self._ledger.close()
        self._signals.close()
        if self._group is not None:
            groups.leave(self._group)

    def _abandon(self) -> None:
        """Leave without waiting for peers: some of them may be gone, or in another place."""
        self._close("stopped" if self._stopped else "failed")

    # ---- where this process is

    @property
    def _formed(self) -> groups.Group:
        if self._group is None:
            raise ConfigError("the session is not open", hint="use it as `with Session(...) as session:`")
        return self._group

    @property
    def _control(self) -> Control:
        return self._formed.control

    @property
    def _trained(self) -> TrainingState:
        if self._state is None:
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        return self._state

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._formed.formation.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self._formed.formation.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._formed.formation.world_size

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that saves and reports."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._placement.device

    @property
    def round(self) -> int:
        """The generation of the state: grows with every resumed life of the job, and never behind the launcher's."""
        return self._position.generation

    @property
    def step_number(self) -> int:
        """Committed steps."""
        return self._position.step

    @property
    def cursor(self) -> Cursor:
        """How far the job has come in the data."""
        return self._position.cursor

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """The metrics of the last state saved as best."""
        return dict(self._position.best)

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that this life of the job began from."""
        return self._origin.name

    # ---- the model

    def register(self, name: str, part: Stateful) -> None:
        """Save and resume ``part`` too, before or after :meth:`wrap`; its state must be alike on all ranks."""
        if self._state is not None:
            self._state.register(name, part)
        else:
            check_part(name, part, self._user)
            self._user[name] = part

    def wrap(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        sync_batchnorm: bool = False,
        ddp_options: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Put ``model`` on the device, resume it, and return what to call: averaged over ranks, if there are several.

        ``scheduler`` is advanced at every step. Buffers follow rank 0 (see replica).
        """
        if self._state is not None:
            raise ConfigError("session.wrap() was called before", hint="wrap one model that holds all trained modules")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau needs a metric", hint="register() it and step it yourself")
        check_optimizer(optimizer, model)
        self._replica = Replica(model, self._placement, ddp_options or {}, sync=sync_batchnorm)
        self._state = TrainingState(
            module=self._replica.module,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            position=self._position,
            user=self._user,
            pending=self._pending,
            device=self.device,
        )
        self._steps = Steps(
            self._replica,
            optimizer,
            scheduler,
            Scaling(scaler, optimizer),
            self._position,
            seed=self._seed,
            device=self.device,
            boundary=self._after_step,
        )
        self._resume(self._state)
        return self._replica.runner

    def _resume(self, state: TrainingState) -> None:
        """Bring all ranks of the present round to one state and let them train together."""
        formation = self._formed.formation

        def take_over(tree: Mapping[str, Any]) -> None:
            state.apply(tree, first_rank=self.is_rank0)

        self._origin = restore(self._control, self._manager, state.collect, take_over)
        first = self._position.generation + 1 if self._origin.name is not None else 0
        newest = max(row[0] for row in self._control.gather([max(formation.round, first)]))
        self._position.generation = newest
        if not self.is_rank0:
            reseed(self._seed, self._position, self.rank, self.device)
        self._replica.bind(self._control)
        self._steps.bind(self._control)
        if self._origin.name is not None:
            self._saver.mark(state)
        self._ledger.identify(rank=self.rank, local_rank=self.local_rank, world=self.world_size, round=self.round)
        place = {"step": self.step_number, "epoch": self.cursor.epoch, "resumed_from": self._origin.name}
        self._ledger.write("opened", **place)
        logs.logger().info("session.opened", world=self.world_size, round=self.round, **place)

    # ---- data

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the cursor's to ``total - 1``; the cursor moves on when the body of one ends."""
        while self.cursor.epoch < total:
            self._in_epochs = True
            yield self.cursor.epoch
            self._in_epochs = False
            self._position.cursor = Cursor(self.cursor.epoch + 1, 0)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        collate: Collate | None = None,
        epochs: int | None = None,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from the cursor on: of the present epoch, or of all up to ``epochs``.

        A batch comes again until a step has committed it.
        """
        self._trained  # noqa: B018 - raises before the first batch, where the mistake is
        if epochs is None and not self._in_epochs:
            raise ConfigError("batches() does not know how many epochs", hint="say epochs=N, or loop over epochs(N)")
        fetch = Fetcher(dataset, self.device, collate, self._before_draw)
        plan = EpochPlan(fetch.length, global_batch_size, micro_batch_size, self._seed, shuffle)
        self._fields = check_fields(plan, self._origin.fields, self._fields, self._allow_changed)
        return self._drawn(Sampler(fetch, plan, even=self._replica.even), epochs)

    def _drawn(self, sampler: Sampler, epochs: int | None) -> Iterator[Batch]:
        while epochs is None or self.cursor.epoch < epochs:
            while not sampler.plan.ended(self.cursor):
                self._batch = sampler.draw(self.cursor, self.rank, self.world_size)
                yield self._batch
            self._batch = None
            if epochs is None:
                return
            self._position.cursor = Cursor(self.cursor.epoch + 1, 0)

    def _before_draw(self, ids: Ids) -> None:
        """Random augmentations are those of this step and sample, also when the batch is drawn again."""
        seeds.seed_all(seeds.key(seeds.DRAW, self._seed, self.step_number, int(ids[0])), self.device)

    # ---- steps

    def step(self) -> Step:
        """The context of one training step about the batch at hand."""
        self._trained  # noqa: B018 - raises where the mistake is
        return self._steps.begin(self._batch)

    def _after_step(self, step: Step) -> None:
        if self._ledger.enabled:
            self._record(step)
        position, step_s = self._position, self._consensus.boundary_s
        self._link.report(Progress("training", position.step, position.cursor.epoch, position.cursor.samples, step_s))
        saved = self._saver_due(position.step)
        self._boundary(saved_now=saved)

    def _saver_due(self, step: int) -> bool:
        if not self._saver.due_by_step(step):
            return False
        self._save_on_schedule()
        return True

    def _record(self, step: Step) -> None:
        batch = step.batch
        self._ledger.write(
            "step",
            step=self.step_number,
            epoch=batch.epoch if batch is not None else self.cursor.epoch,
            samples=[int(each) for each in batch.ids] if batch is not None else [],
            global_samples=batch.global_size if batch is not None else 0,
            loss=step.local_mean(),
        )

    def _boundary(self, *, saved_now: bool = False) -> None:
        """All ranks pass here equally often; what they agreed on happens here, on all of them."""
        agreed = self._consensus.boundary(self._wishes, urgent=self._signals.requested is not None)
        if agreed is None:
            return
        if agreed.nonfinite:
            self._meet_nonfinite()
        if agreed.stop:
            self._stop()
        if agreed.save and not saved_now:
            self._save_on_schedule()

    def _wishes(self) -> Flags:
        return Flags(
            stop=self._signals.requested is not None,
            save=self._saver.due_by_time(),
            nonfinite=self._save_failed or (self._state is not None and self._steps.nonfinite()),
        )

    def _meet_nonfinite(self) -> None:
        if self._nonfinite_fatal:
            raise NonFiniteError(
                f"the loss or a parameter became NaN or infinite by step {self.step_number}",
                hint="lower the learning rate, clip gradients, or look for bad samples; nonfinite='warn' goes on",
            )
        logs.logger().warning("loss.nonfinite", step=self.step_number)

    def _save_on_schedule(self) -> None:
        if self.is_rank0:
            problem = self._saver.attempt(self._trained, self.world_size, self._fields)
            self._save_failed |= isinstance(problem, NonFiniteError) and self._nonfinite_fatal

    def _on_saved(self, committed: Committed) -> None:
        self._ledger.write("checkpoint", step=self.step_number, name=committed.name, duration_s=committed.duration_s)

    def _stop(self) -> None:
        """All ranks leave here, with a checkpoint."""
        self._signals.agreed()
        logs.logger().info("session.stopping", step=self.step_number)
        if self._state is not None:
            self._save_last("stopped")
        self._stopped = True
        raise SystemExit(self._signals.exit_code)

    def _patience_s(self) -> float:
        """Slow steps need longer to agree."""
        boundary_s = self._consensus.boundary_s if self._group is not None else 0.0
        return max(self._stop_timeout_s, _STOP_BOUNDARIES * boundary_s)

    # ---- between steps; all ranks must call these alike

    def save(self, metrics: Mapping[str, float] | None = None, best: bool = False) -> str | None:
        """Save now; the checkpoint's name on rank 0. Raises on all ranks if it cannot be saved."""
        state = self._trained
        if self._steps.inside:
            raise ConfigError("session.save() inside a step", hint="call it after the step has ended")
        committed: Committed | None = None
        problem: ElasticTrainerError | None = None
        values = dict(metrics or {})
        self._control.sum(Purpose.SAVE)
        if self.is_rank0:
            for name, value in values.items():
                self._ledger.write(
                    "metric", step=self.step_number, epoch=self.cursor.epoch, name=name, value=float(value)
                )
            try:
                committed = self._saver.save(state, self.world_size, self._fields, values, best=best)
            except (CheckpointError, NonFiniteError) as error:
                problem = error
        elif best:
            self._position.best = values
        self._control.agree(problem)
        return committed.name if committed is not None else None

    def evaluate(
        self, model: nn.Module, dataset: Any, batch_size: int, fn: evaluation.Measure, *, collate: Collate | None = None
    ) -> dict[str, float]:
        """``{name: sum / count}`` over ``dataset``, each sample once; ``fn(model, batch) -> {name: (sum, count)}``."""
        self._control.sum(Purpose.EVALUATE)
        module = model
        if self._state is not None:
            module = self._replica.unwrap(model)
            self._replica.align_buffers(self._control)
        self._consensus.reset()
        fetch = Fetcher(dataset, self.device, collate)
        result = evaluation.evaluate(module, fetch, batch_size, fn, self._control, self._evaluation_turn)
        self._consensus.reset()
        return result

    def _evaluation_turn(self) -> None:
        cursor = self.cursor
        step_s = self._consensus.boundary_s
        self._link.report(Progress("evaluating", self.step_number, cursor.epoch, cursor.samples, step_s))
        self._boundary()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks, in place."""
        if self._formed.formed and self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._control.sum(Purpose.BARRIER)
