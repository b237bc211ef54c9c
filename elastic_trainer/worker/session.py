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

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import nn

from elastic_trainer import settings
from elastic_trainer.checkpoint import CheckpointManager, Committed, EventSink, Retention
from elastic_trainer.data.sampler import Batch, Collate, Fetcher
from elastic_trainer.errors import (
    EXIT_CANNOT_WRITE,
    CheckpointError,
    ConfigError,
    ElasticTrainerError,
    NonFiniteError,
    RejoinError,
)
from elastic_trainer.ipc.messages import StateReport
from elastic_trainer.model import Cursor
from elastic_trainer.telemetry import logs
from elastic_trainer.worker import device, evaluation, seeds
from elastic_trainer.worker import group as groups
from elastic_trainer.worker.boundaries import Boundaries, Turn
from elastic_trainer.worker.channel_link import ChannelLink
from elastic_trainer.worker.control import Control, Purpose
from elastic_trainer.worker.feed import Feed
from elastic_trainer.worker.healing import heal, identity
from elastic_trainer.worker.ledger import Ledger
from elastic_trainer.worker.link import EnvironmentLink, Formation, Link, Progress
from elastic_trainer.worker.replica import Replica, check_optimizer
from elastic_trainer.worker.resume import Origin, restore
from elastic_trainer.worker.rounds import Rounds
from elastic_trainer.worker.saving import Cadence, Saver, check_storage
from elastic_trainer.worker.scaling import Scaling
from elastic_trainer.worker.signals import Signals
from elastic_trainer.worker.state import Position, Stateful, TrainingState, check_part, reseed
from elastic_trainer.worker.steps import Step, Steps

GROUP_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
FORM_TIMEOUT_S = 10.0

Result = TypeVar("Result")


class Session:
    """See the module. ``checkpoint_dir`` None: nothing is saved. ``nonfinite``: ``raise`` or ``warn``.

    ``keep_last`` and ``keep_every`` (a step multiple) say which checkpoints stay, or ``retention`` instead of them.
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
        keep_every: int | None = None,
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
        self._retention = retention if retention is not None else Retention(keep_last, keep_every)
        self._cadence = Cadence(checkpoint_every_steps, checkpoint_every_s)
        self._seed, self._asked_device, self._allow_changed = seed, device, frozenset(allow_changed)
        self._fatal, self._stop_timeout_s = nonfinite == "raise", stop_timeout_s
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
        self._slowest_stop_s: Callable[[], float] = float
        self._stopped = self._evaluating = False
        self._link_given = link is not None
        self._rounds: Rounds | None = None
        self._manager: CheckpointManager | None = None
        self._saver: Saver | None = None
        self._boundaries: Boundaries | None = None
        self._valid = False
        """In place: whether the state held here may be given to others."""
        self._unrecorded: Step | None = None

    # ---- opening and closing

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            logs.configure()
        self._signals = Signals(self._patience_s, self._broken)
        self._signals.open()
        try:
            if self._link_given or not self.environment.in_place:
                self._open()
            else:
                self._open_in_place()
        except BaseException:
            self._abandon()
            raise
        return self

    def _open(self) -> None:
        """One round for the life of the process: meet the others now."""
        formation = self._link.formation()
        self._place(formation.local_rank, formation.world_size)
        self._group = groups.form(formation, self._placement, self._group_timeout_s)
        self._position.generation = formation.round
        self._lead()
        check_storage(self._manager, self._control)

    def _open_in_place(self) -> None:
        """Rounds come and go: meet the others when the model is there."""
        link = ChannelLink(self.environment)
        self._link = link
        self._rounds = Rounds(link, form_timeout_s=FORM_TIMEOUT_S, group_timeout_s=self._group_timeout_s)
        self._signals.on_request = link.evicted
        self._place(self.environment.local_rank, world_size=2)

    def _place(self, local_rank: int, world_size: int) -> None:
        self._placement = device.take(self._asked_device, local_rank, world_size)
        self._feed = Feed(self._position, self._seed, self._placement.device, self._allow_changed)
        logs.bind(run=self.environment.run_id, node=self.environment.node, role="worker")
        seeds.seed_all(seeds.key(seeds.START, self._seed), self._placement.device)

    def _lead(self) -> None:
        """Take up this rank's duties in the round just formed: look for checkpoints, save them, agree."""
        logs.bind(rank=self.rank)
        if self._saver is None:
            # One rank of each node looks for checkpoints.
            if self._directory is not None and (self.is_rank0 or self.local_rank == 0):
                self._manager = CheckpointManager(self._directory, self._retention, self._on_checkpoint_event)
            self._saver = Saver(None, self._cadence, self._on_saved)
        self._saver.serve(self._manager if self.is_rank0 else None)
        known = self._knows_drain if self._rounds is not None else None
        self._boundaries = Boundaries(self._control, self._signals, self._saver, fatal=self._fatal, in_place=known)
        self._slowest_stop_s = self._boundaries.slowest_stop_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stopped or error is not None:
            self._abandon()
            return
        try:
            self._repeated(self._finish, joinable=True)
        except BaseException:
            self._abandon()
            raise
        self._close("done")

    def _finish(self) -> None:
        """All ranks have come to the end: save what is not saved, and leave together."""
        self._signals.agreed()
        self._boundaries_here.end()
        if self._state is not None:
            self._save_last("done")
        self._control.sum(Purpose.FINISH)

    def _save_last(self, status: str) -> None:
        problem: Exception | None = None
        if self._saver_here.unsaved:
            problem = self._saver_here.attempt()
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
            if self._rounds is not None:
                raise ConfigError(
                    "in place a process has no rank before its model is ready", hint="ask after session.wrap()"
                )
            raise ConfigError("the session is not open", hint="use it as `with Session(...) as session:`")
        return self._group

    @property
    def _control(self) -> Control:
        return self._formed.control

    @property
    def _saver_here(self) -> Saver:
        if self._saver is None:
            raise RuntimeError("no round has been entered")
        return self._saver

    @property
    def _boundaries_here(self) -> Boundaries:
        if self._boundaries is None:
            raise RuntimeError("no round has been entered")
        return self._boundaries

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
        return self.environment.local_rank if self._group is None else self._group.formation.local_rank

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
        in_place = self._rounds is not None
        self._replica = Replica(model, self._placement, ddp_options or {}, sync=sync_batchnorm, lasting=in_place)
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
            absorb=self._absorb,
        )
        if self._rounds is None:
            self._resume(self._state)
        else:
            self._enter_round(self._rounds)
        return self._replica.runner

    def _resume(self, state: TrainingState) -> None:
        """Bring all ranks of the present round to one state and let them train together."""
        formation = self._formed.formation

        def take_over(tree: Mapping[str, Any]) -> None:
            state.apply(tree, first_rank=self.is_rank0)

        self._origin = restore(self._control, self._manager, state.collect, take_over)
        first = self._position.generation + 1 if self._origin.name is not None else 0
        newest = max(row[0] for row in self._control.gather([max(formation.round, first)]))
        self._take_part(state, newest, self._origin.fields)
        if self._origin.name is not None:
            self._saver_here.resumed()

    def _take_part(self, state: TrainingState, generation: int, fields: Mapping[str, Any]) -> None:
        """All ranks hold one state: bind everything to the round, and begin."""
        self._position.generation = generation
        if not self.is_rank0:
            reseed(self._seed, self._position, self.rank, self.device)
        self._replica.bind(self._control)
        self._steps.bind(self._control)
        self._feed.bind(self._control, fields, even=self._replica.even)
        self._saver_here.bind(state, self.world_size, lambda: self._feed.fields)
        self._boundaries_here.watch(self._steps)
        self._ledger.identify(rank=self.rank, local_rank=self.local_rank, world=self.world_size, round=self.round)
        place = {"step": self.step_number, "epoch": self.cursor.epoch, "resumed_from": self._origin.name}
        self._ledger.write("opened", **place)
        logs.logger().info("session.opened", world=self.world_size, round=self.round, **place)

    # ---- rounds in place

    def _enter_round(
        self, rounds: Rounds, *, planned: bool = False, joinable: bool = True, following: Formation | None = None
    ) -> None:
        """Come into the next round with the state that is held here, or get it from those who hold it."""
        span_s = self._boundaries.span_s if self._boundaries is not None else 0.0
        rounds.enter(
            self._placement,
            self._state_report,
            self._settle,
            planned=planned,
            joinable=joinable,
            following=following,
            idle=self._while_waiting,
            step_time_s=span_s,
        )

    def _state_report(self) -> StateReport | None:
        return StateReport(round=self._position.lineage, step=self._position.step) if self._valid else None

    def _settle(self, group: groups.Group) -> None:
        """A round has been formed: all ranks come to one state."""
        state = self._trained
        self._group = group
        self._lead()
        mine = identity(state.collect(), self._position.lineage, self.step_number) if self._valid else None
        least = max(group.formation.round, self._position.generation + 1)
        healed = heal(self._control, mine, least, self, {"fields": self._feed.fields or dict(self._origin.fields)})
        if healed.source is None:
            self._valid = False
            check_storage(self._manager, self._control)
            self._resume(state)
            self._valid = True
            return
        fields = healed.notes["fields"] if self.rank in healed.behind else self._origin.fields
        if self.rank in healed.behind:
            self._origin = Origin(None, fields)
        self._take_part(state, healed.generation, fields)
        self._record_late(healed.generation)

    def collect(self) -> dict[str, Any]:
        """The whole training state, for a rank that needs it (its tensors are the live ones)."""
        return self._trained.collect()

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Make ``state`` of another rank this rank's own. It is no valid source while that goes on."""
        self._valid = False
        self._trained.apply(state, first_rank=False)
        self._steps.dirty = False
        self._valid = True

    def _absorb(self, step: Step, error: BaseException) -> bool:
        """If ``error`` is the end of the round: come into the next one, and let the batch come again."""
        rounds = self._rounds
        if rounds is None or not rounds.confirms(error):
            return False
        if step.committed:
            if self._unrecorded is not step and self._ledger.enabled and not step.recorded:
                self._record(step)
        else:
            self._valid = self._valid and not self._steps.dirty
            self._steps.undo()
            self._unrecorded = step
        self._regroup(rounds, joinable=True)
        return True

    def _regroup(self, rounds: Rounds, *, joinable: bool) -> None:
        self._replica.release()
        rounds.abandon()
        self._enter_round(rounds, joinable=joinable)

    def _repeated(self, attempt: Callable[[], Result], *, joinable: bool = False) -> Result:
        """``attempt()``, again after each round that ends in the middle of it."""
        while True:
            try:
                return attempt()
            except (RejoinError, RuntimeError) as error:
                rounds = self._rounds
                if rounds is None or self._state is None or not rounds.confirms(error):
                    raise
                self._regroup(rounds, joinable=joinable)

    def _knows_drain(self) -> bool:
        rounds = self._rounds
        return rounds is not None and not self._evaluating and rounds.link.drain(rounds.number) is not None

    def _switch(self) -> None:
        """All ranks know of the planned change and are behind the same step: leave, or go on in the next round."""
        rounds = self._rounds
        drain = rounds.link.drain(rounds.number) if rounds is not None else None
        if rounds is None or drain is None:
            raise RuntimeError("a planned change was agreed on that this rank does not know")
        if drain.waits:
            self._save_before_waiting()
        if drain.next is None and self._signals.requested is not None:
            self._stopped = True
            self._ledger.write("closed", step=self.step_number, status="stopped")
            raise SystemExit(self._signals.exit_code)
        self._replica.release()
        rounds.abandon(planned=True)
        following = rounds.link.place(drain.next) if drain.next is not None else None
        self._enter_round(rounds, planned=True, following=following)

    def _save_before_waiting(self) -> None:
        """Too few nodes will be left: what is only in memory is made durable first."""
        if self._saver_here.unsaved:
            self._saver_here.attempt()
        self._control.sum(Purpose.STOP)

    def _while_waiting(self) -> None:
        """No round for a second: too few nodes, or no store. What is only in memory is made durable."""
        if not self._valid or self._manager is None or self._saver is None:
            return
        self._saver.serve(self._manager)
        if self._saver_here.unsaved:
            self._saver_here.attempt()

    def _record_late(self, generation: int) -> None:
        """Peers may have committed the step that this rank had to give up: then its samples count as well."""
        step, self._unrecorded = self._unrecorded, None
        if step is None or not self._ledger.enabled or self.step_number != step.number:
            return
        if self._position.lineage == step.generation:
            self._record(step, round=step.generation, rank=step.rank, world=step.world_size)

    # ---- data

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the cursor's to ``total - 1``; the cursor moves on when the body of one ends."""
        return self._feed.epochs(total)

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
        self._trained  # noqa: B018 - raises where the mistake is
        return self._feed.batches(
            dataset, global_batch_size, micro_batch_size, shuffle=shuffle, collate=collate, epochs=epochs
        )

    # ---- steps

    def step(self) -> Step:
        """The context of one training step about the batch at hand."""
        self._trained  # noqa: B018 - raises where the mistake is
        return self._steps.begin(self._feed.batch)

    def _after_step(self, step: Step) -> None:
        if self._ledger.enabled:
            self._record(step)
        self._report("training")
        turn = self._boundaries_here.after_step(self._position.step)
        if turn is Turn.STOP:
            self._stop()
        elif turn is Turn.SWITCH:
            self._switch()

    def _report(self, phase: str) -> None:
        cursor = self._position.cursor
        self._link.report(
            Progress(phase, self._position.step, cursor.epoch, cursor.samples, self._boundaries_here.span_s)
        )

    def _record(self, step: Step, **place: int) -> None:
        batch = step.batch
        step.recorded = True
        self._ledger.write(
            "step",
            **place,
            step=step.number,
            epoch=batch.epoch if batch is not None else self.cursor.epoch,
            samples=[int(each) for each in batch.ids] if batch is not None else [],
            global_samples=batch.global_size if batch is not None else 0,
            loss=step.local_mean(),
        )

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

    def _broken(self) -> str | None:
        return self._link.broken(self._group.formation.round) if self._group is not None else None

    def _patience_s(self) -> float:
        """Slow steps need longer to agree."""
        return max(self._stop_timeout_s, self._slowest_stop_s())

    # ---- between steps; all ranks must call these alike

    def save(self, metrics: Mapping[str, float] | None = None, best: bool = False) -> str | None:
        """Save now; the checkpoint's name on rank 0. Raises on all ranks if it cannot be saved."""
        return self._repeated(lambda: self._save(metrics, best))

    def _save(self, metrics: Mapping[str, float] | None, best: bool) -> str | None:
        self._trained  # noqa: B018 - raises where the mistake is
        if self._steps.inside:
            raise ConfigError("session.save() inside a step", hint="call it after the step has ended")
        committed: Committed | None = None
        problem: ElasticTrainerError | None = None
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._control.sum(Purpose.SAVE)
        if best:
            self._position.best = values
        if self.is_rank0:
            for name, value in values.items():
                self._ledger.write("metric", step=self.step_number, epoch=self.cursor.epoch, name=name, value=value)
            try:
                committed = self._saver_here.save(values, best=best)
            except (CheckpointError, NonFiniteError) as error:
                problem = error
        self._control.agree(problem)
        return committed.name if committed is not None else None

    def evaluate(
        self, model: nn.Module, dataset: Any, batch_size: int, fn: evaluation.Measure, *, collate: Collate | None = None
    ) -> dict[str, float]:
        """``{name: sum / count}`` over ``dataset``, each sample once; ``fn(model, batch) -> {name: (sum, count)}``."""
        self._evaluating = True
        try:
            return self._repeated(lambda: self._evaluate(model, dataset, batch_size, fn, collate))
        finally:
            self._evaluating = False

    def _evaluate(
        self, model: nn.Module, dataset: Any, batch_size: int, fn: evaluation.Measure, collate: Collate | None
    ) -> dict[str, float]:
        self._control.sum(Purpose.EVALUATE)
        module = model
        if self._state is not None:
            module = self._replica.unwrap(model)
            self._replica.align_buffers(self._control)
        self._boundaries_here.begin_phase()
        fetch = Fetcher(dataset, self.device, collate)
        result = evaluation.evaluate(module, fetch, batch_size, fn, self._control, self._evaluation_turn)
        self._boundaries_here.begin_phase()
        return result

    def _evaluation_turn(self) -> None:
        self._report("evaluating")
        if self._boundaries_here.cross() is Turn.STOP:
            self._stop()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks, in place."""
        if not self._formed.formed or self.world_size == 1:
            return tensor
        if self._rounds is None or self._steps.inside:
            dist.all_reduce(tensor)  # a step that fails is repeated as a whole
            return tensor
        before = tensor.clone()
        return self._repeated(lambda: self._all_reduce(tensor, before))

    def _all_reduce(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensor.copy_(value)
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._repeated(lambda: self._control.sum(Purpose.BARRIER))
