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
*Fails by* ConfigError and DataError for what the script asks wrongly, StorageError for a directory that cannot be
written at the start, CheckpointError for what cannot be resumed, RoundBrokenError when a peer is lost; SystemExit 143
when stopped, 73 when the last save failed and ``require_last_save`` was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastic_trainer import settings
from elastic_trainer.checkpoint import EventSink, Retention
from elastic_trainer.data.child import let_go
from elastic_trainer.data.loading import Loading
from elastic_trainer.data.plan import LrRule
from elastic_trainer.data.sampler import Batch, Collate
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor, Phase
from elastic_trainer.telemetry import logs
from elastic_trainer.web.node import NodeEndpoint
from elastic_trainer.worker import evaluation, forks
from elastic_trainer.worker.collectives import Collectives
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm import placement as device
from elastic_trainer.worker.comm.control import Purpose
from elastic_trainer.worker.comm.failures import is_collective_failure
from elastic_trainer.worker.comm.link import EnvironmentLink, Link
from elastic_trainer.worker.comm.sever import Sockets
from elastic_trainer.worker.inplace.agent_link import ChannelLink
from elastic_trainer.worker.inplace.call_replay import JSON, TENSOR
from elastic_trainer.worker.inplace.recovery import Recovery
from elastic_trainer.worker.inplace.rounds import Rounds
from elastic_trainer.worker.model import ema
from elastic_trainer.worker.model.loss_scaling import Scaling
from elastic_trainer.worker.model.replica import Reduction, Replica, check_optimizer
from elastic_trainer.worker.report.endpoint import open_endpoint
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.saver import Cadence
from elastic_trainer.worker.state.training_state import Position, Stateful, TrainingState, check_part
from elastic_trainer.worker.steps.boundary import Turn
from elastic_trainer.worker.steps.commit import Steps
from elastic_trainer.worker.steps.comparison import EVERY_STEPS, OnDifference
from elastic_trainer.worker.steps.rank_context import Plan, RankContext, Trained
from elastic_trainer.worker.steps.second_optimizers import SecondOptimizers
from elastic_trainer.worker.steps.signals import Signals
from elastic_trainer.worker.steps.step import Step

STOP_TIMEOUT_S = 10.0

Kind = TypeVar("Kind", bound=StrEnum)


class Session:
    """See the module. ``checkpoint_dir`` None: nothing is saved. ``nonfinite``: ``raise`` or ``warn``.

    After each multiple of ``compare_every_steps``, and at the end, the parameters of all ranks are compared: where they
    differ the training stops, or with ``on_difference="heal"`` goes on with the state that most ranks hold.

    ``keep_last`` and ``keep_every`` (a step multiple) say which checkpoints stay, or ``retention`` instead of them.
    ``allow_changed`` names fields (length, global_batch, micro_batch, seed, shuffle, ...) that a resumed job may have
    changed. ``backend`` is "auto" (NCCL where all ranks are on CUDA devices), "gloo" (also for several processes that
    share a CUDA device) or "nccl". ``stop_timeout_s`` bounds how long the ranks may take to agree to stop.
    ``require_last_save``: end with exit code 73, on all ranks, where the state at the end cannot be saved.
    ``group_timeout_s`` None: a collective may take as long as the agent lets a rank do something else, and 600 s where
    there is none.
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
        require_last_save: bool = False,
        compare_every_steps: int | None = EVERY_STEPS,
        on_difference: str = OnDifference.STOP,
        backend: str = device.AUTO,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        group_timeout_s: float | None = None,
        on_checkpoint_event: EventSink | None = None,
        link: Link | None = None,
    ) -> None:
        if seed < 0:
            raise ConfigError(f"seed is {seed}", hint="it must not be negative")
        if nonfinite not in ("raise", "warn"):
            raise ConfigError(f"nonfinite is {nonfinite!r}", hint="use 'raise' or 'warn'")
        if compare_every_steps is not None and compare_every_steps < 1:
            raise ConfigError(f"compare_every_steps is {compare_every_steps}", hint="use 1 or more, or None for never")
        self._plan = Plan(
            directory=Path(checkpoint_dir) if checkpoint_dir is not None else None,
            retention=retention if retention is not None else Retention(keep_last, keep_every),
            cadence=Cadence(checkpoint_every_steps, checkpoint_every_s),
            seed=seed,
            allow_changed=frozenset(allow_changed),
            fatal=nonfinite == "raise",
            require_last_save=require_last_save,
            compare_every_steps=compare_every_steps,
            heals_differences=_one_of(OnDifference, on_difference, "on_difference") is OnDifference.HEAL,
            on_checkpoint_event=on_checkpoint_event,
        )
        self._asked_device, self._backend = device, backend
        self.environment = settings.worker_environment()
        self._stop_timeout_s = stop_timeout_s
        self._group_timeout_s = group_timeout_s if group_timeout_s is not None else self.environment.group_timeout
        self._given_link = link
        self._position = Position()
        self._user: dict[str, Stateful] = {}
        self._pending: dict[str, Any] = {}
        self._part: RankContext | None = None
        self._recovery: Recovery | None = None
        self._tracker = HeartbeatReporter()
        self._endpoint: NodeEndpoint | None = None
        self._held: list[Callable[[], list[int]]] = []
        """What gives the descriptors that are this session's own."""
        self._foreign = False
        """Whether this process was forked from the one that trains."""
        self._second_optimizers: SecondOptimizers | None = None

    # ---- opening and closing

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            logs.configure()
        self._tracker = HeartbeatReporter.open(self.environment)
        self._signals = Signals(self._patience_s, self._broken, self._saving)
        self._signals.open()
        self._held = [self._signals.descriptors]
        forks.watch(self._disown)
        self._link: Link = self._given_link if self._given_link is not None else EnvironmentLink(self.environment)
        try:
            self._endpoint = open_endpoint(self.environment, self._tracker)
            if self._endpoint is not None:
                self._held.append(self._endpoint.descriptors)
            if self._given_link is None and self.environment.in_place:
                self._open_in_place()
            else:
                self._open()
        except BaseException:
            self._abandon()
            raise
        return self

    def _open(self) -> None:
        """One round for the life of the process: meet the others now."""
        formation = self._link.formation()
        part = self._take_place(formation.local_rank, formation.world_size)
        self._position.generation = formation.round
        sockets = Sockets()
        self._held.append(sockets.descriptors)
        with self._tracker.during(Phase.RENDEZVOUS):
            sockets.forming(groups.store_ends(formation))
            forming_s = min(settings.GROUP_TIMEOUT_S, self._group_timeout_s)
            group = groups.form(formation, part.placement, groups.FormTimeouts(forming_s, self._group_timeout_s))
            sockets.formed(group.listening)
        part.enter(group, self._signals)
        part.check_storage()

    def _open_in_place(self) -> None:
        """Rounds come and go: meet the others when the model is there."""
        link = ChannelLink(self.environment)
        self._link = link
        self._signals.on_request = link.evicted
        limit_s = self.environment.form_timeout
        rounds = Rounds(link, form_timeout_s=limit_s, group_timeout_s=self._group_timeout_s)
        self._held += [link.descriptors, rounds.descriptors]
        part = self._take_place(self.environment.local_rank, world_size=2)
        self._recovery = Recovery(rounds, part, self._signals)

    def _take_place(self, local_rank: int, world_size: int) -> RankContext:
        placement = device.take(self._asked_device, local_rank, world_size, self._backend)
        self._part = RankContext(self._plan, self.environment, self._link, placement, self._position, self._tracker)
        return self._part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._foreign:
            return
        if error is not None and is_collective_failure(error):
            self._tracker.describe(lost_peer=True)
        if self._here.stopped or error is not None:
            self._abandon()
            return
        try:
            self._all.repeated(self._finish)
        except BaseException:
            self._abandon()
            raise
        self._close("done")

    def _finish(self) -> None:
        """All ranks have come to the end: save what is not saved, and leave together."""
        self._tracker.change(Phase.ENDING)
        self._signals.agreed()
        self._here.boundaries.end()
        if self._here.trained is not None:
            self._here.save_last("done")
        self._here.control.sum(Purpose.FINISH)

    def _disown(self) -> None:
        """In a child that the script has forked: nothing of the session is its own."""
        self._signals.disown()
        let_go([number for held in self._held for number in held() if number >= 0])
        self._tracker.disown()
        part, self._part, self._recovery, self._foreign = self._part, None, None, True
        if part is not None:
            forks.keep(part)
            if part.trained is not None:
                part.trained.steps.disown()

    def _close(self, status: str) -> None:
        self._tracker.change(Phase.ENDING)
        self._link.close(status)
        self._signals.close()
        forks.leave(self._disown)
        if self._part is not None:
            self._part.leave()
        self._tracker.close()
        if self._second_optimizers is not None:
            self._second_optimizers.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _abandon(self) -> None:
        """Leave without waiting for peers: some of them may be gone, or in another place."""
        self._close("stopped" if self._part is not None and self._part.stopped else "failed")

    def _patience_s(self) -> float:
        """Slow steps need longer to agree."""
        return max(self._stop_timeout_s, self._part.slowest_stop_s() if self._part is not None else 0.0)

    def _broken(self) -> str | None:
        group = self._part.entered if self._part is not None else None
        return self._link.broken(group.formation.round) if group is not None else None

    def _saving(self) -> bool:
        return self._tracker.saving

    # ---- where this process is

    @property
    def _here(self) -> RankContext:
        if self._foreign:
            raise ConfigError(
                "this process was forked from the one that trains, and has no part in its session",
                hint="use the session in the process that opened it",
            )
        if self._part is None:
            raise ConfigError("the session is not open", hint="use it as `with Session(...) as session:`")
        return self._part

    @property
    def _all(self) -> Collectives:
        return Collectives(self._here, self._recovery, self._stop)

    @property
    def _trained(self) -> Trained:
        trained = self._here.trained
        if trained is None:
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        return trained

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._here.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self._part.local_rank if self._part is not None else self.environment.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self._here.formed.formation.world_size

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that saves and reports."""
        return self._here.is_rank0

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._here.placement.device

    @property
    def round(self) -> int:
        """The generation of the state: grows with every resumed life of the job, and never behind the launcher's."""
        return self._position.generation

    @property
    def round_reason(self) -> str:
        """Why the present round was formed ("node n2 was lost", say); empty where that is not known."""
        return self._here.formed.formation.reason

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
        return self._here.origin.name if self._part is not None else None

    # ---- the model

    def register(self, name: str, part: Stateful) -> None:
        """Save and resume ``part`` too, before or after :meth:`wrap`; its state must be alike on all ranks.

        In place a rank may be given the state of another that is one collective ahead: behind a step, change ``part``
        after the collectives that follow it (``step.loss``, ``save``, ...), not before them.
        """
        trained = self._part.trained if self._part is not None else None
        if trained is not None:
            trained.state.register(name, part)
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
        reduction: str = Reduction.DDP,
        average: float | AveragedModel | None = None,
        ddp_options: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Put ``model`` on the device, resume it, and return what to call: averaged over ranks, if there are several.

        ``scheduler`` is advanced at every step. Buffers follow rank 0 (see replica).

        ``reduction`` says how gradients are added up: ``"ddp"``, or ``"tree"`` for a training whose bits do not depend
        on the number of ranks. ``average`` keeps an exponential moving average of the parameters with that decay (or
        one of your own, from torch.optim.swa_utils), advanced at each step: see :attr:`average`.
        """
        part = self._here
        if part.trained is not None:
            raise ConfigError("session.wrap() was called before", hint="wrap one model that holds all trained modules")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau needs a metric", hint="register() it and step it yourself")
        check_optimizer(optimizer, model)
        how = _one_of(Reduction, reduction, "reduction")
        lasting = self._recovery is not None
        replica = Replica(
            model,
            part.placement,
            ddp_options or {},
            sync=sync_batchnorm,
            lasting=lasting,
            reduction=how,
        )
        averaged = ema.averaged(replica.module, average)
        state = TrainingState(
            module=replica.module,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            position=self._position,
            user=self._user,
            pending=self._pending,
            device=self.device,
            average=averaged,
        )
        steps = Steps(
            replica,
            optimizer,
            scheduler,
            Scaling(scaler, optimizer),
            self._position,
            seed=self._plan.seed,
            device=self.device,
            boundary=self._after_step,
            average=averaged,
        )
        part.train(Trained(state, replica, steps))
        if self._recovery is None:
            with self._tracker.during(Phase.HEALING):
                part.resume()
        else:
            steps.absorb = self._recovery.absorb
            self._second_optimizers = SecondOptimizers(replica.module, optimizer, self._user, steps)
            self._recovery.enter()
        return replica.runner

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped, without what averages its gradients: to export, or to use on one rank alone."""
        return self._trained.replica.module

    @property
    def average(self) -> nn.Module:
        """The model with the averaged parameters, to evaluate or export; not to be trained."""
        averaged = self._trained.state.average
        if averaged is None:
            raise ConfigError("no average is kept", hint="say session.wrap(..., average=0.999)")
        return averaged.module

    # ---- data

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the cursor's to ``total - 1``; the cursor moves on when the body of one ends."""
        return self._here.feed.epochs(total)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        scale_from: int | None = None,
        lr_rule: str = LrRule.NONE,
        collate: Collate | None = None,
        epochs: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        bad_samples: str = "raise",
        max_bad_fraction: float = 0.01,
        multiprocessing_context: str | None = None,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from the cursor on: of the present epoch, or of all up to ``epochs``.

        A batch comes again until a step has committed it. ``dataset`` is map-style, or a SeekableStream (with
        ``shuffle=False``: it comes in its own order). Random numbers drawn for a sample are keyed by (seed, epoch,
        sample), so its augmentation does not depend on where it is drawn; a data set with ``deterministic = True``
        draws none, one with ``generators = ("random",)`` draws from that one alone (of "random", "numpy", "torch") and
        costs less, and one with ``set_epoch(epoch)`` is told of each epoch, in every process.

        The global batch is the same at any number of ranks. With ``scale_from=R`` it is the one for R ranks, and with W
        ranks W / R times as large (rounded); the learning rate that the optimizer has is then multiplied by what
        ``lr_rule`` says ("linear", "sqrt", "none") for each update. Both are kept in the checkpoint.

        With ``workers`` that many processes per rank fetch ``prefetch`` micro-batches each ahead of use (plain tensors
        are always taken directly). They hold the data set as it was at the first batch, and none of its sockets.
        ``pin_memory`` None: when the device is CUDA.

        ``bad_samples="skip"`` leaves out samples that raise: they are logged and counted (``skipped_samples``), and
        the gradient is that of the sum over the samples present, divided by the planned size of the global batch.
        DataError when more than ``max_bad_fraction`` of this rank's samples of an epoch (and more than 8) are bad, or
        all of a micro-batch.
        """
        self._trained  # noqa: B018 - raises where the mistake is
        loading = Loading(workers, prefetch, pin_memory, bad_samples, max_bad_fraction, multiprocessing_context)
        return self._here.feed.batches(
            dataset,
            global_batch_size,
            micro_batch_size,
            shuffle=shuffle,
            scale_from=scale_from,
            lr_rule=_one_of(LrRule, lr_rule, "lr_rule"),
            collate=collate,
            epochs=epochs,
            loading=loading,
        )

    @property
    def skipped_samples(self) -> int:
        """How many samples this process has left out because they raise."""
        return self._here.feed.tally.total

    # ---- steps

    def step(self) -> Step:
        """The context of one training step about the batch at hand."""
        feed = self._here.feed
        if feed.batch is None:
            feed.change()
        return self._trained.steps.begin(feed.batch)

    def _after_step(self, step: Step) -> None:
        part = self._here
        if part.ledger.enabled:
            part.record(step)
        part.report("training")
        turn = part.boundaries.after_step(self._position.step)
        if turn is Turn.STOP:
            self._stop()
        elif turn is Turn.SWITCH and self._recovery is not None:
            self._recovery.agreed()

    def _stop(self) -> None:
        """All ranks leave here, with a checkpoint."""
        self._signals.agreed()
        logs.logger().info("session.stopping", step=self.step_number)
        if self._here.trained is not None:
            self._here.save_last("stopped")
        self._here.stopped = True
        raise SystemExit(self._signals.exit_code)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the script does in the body takes long for good reason: "evaluation" or "checkpoint".

        It is told apart in the metrics, and the watchdog gives it the time of a long phase instead of that of a step.
        """
        if name not in (Phase.EVALUATION, Phase.CHECKPOINT):
            raise ConfigError(f"phase is {name!r}", hint="use 'evaluation' or 'checkpoint'")
        with self._tracker.during(Phase(name)):
            yield

    # ---- between steps; all ranks must call these alike

    def save(self, metrics: Mapping[str, float] | None = None, best: bool = False) -> str | None:
        """Save now; the checkpoint's name, on all ranks alike. None where there is no ``checkpoint_dir``, or where it
        refuses (full, read-only, ...): that is logged and counted, and the training goes on.
        """
        return self._all.save(metrics, best=best)

    def evaluate(
        self, model: nn.Module, dataset: Any, batch_size: int, fn: evaluation.Measure, *, collate: Collate | None = None
    ) -> dict[str, float]:
        """``{name: sum / count}`` over ``dataset``, each sample once; ``fn(model, batch) -> {name: (sum, count)}``."""
        return self._all.evaluated(model, dataset, batch_size, collate, partial(evaluation.evaluate, measure=fn), JSON)

    def predict(
        self, model: nn.Module, dataset: Any, batch_size: int, fn: evaluation.Predict, *, collate: Collate | None = None
    ) -> torch.Tensor:
        """What ``fn(model, batch)`` gives, a row for each sample, for all of ``dataset``, in its order, on all ranks.

        On the CPU; for metrics that need all predictions at once, such as average precision. Shape: (length, *row).
        """
        return self._all.evaluated(model, dataset, batch_size, collate, partial(evaluation.predict, fn=fn), TENSOR)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over all ranks, in place."""
        return self._all.all_reduce(tensor)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._all.barrier()


def _one_of(kind: type[Kind], value: str, what: str) -> Kind:
    """``value`` as one of ``kind``; ConfigError names them all."""
    if value not in list(kind):
        raise ConfigError(f"{what} is {value!r}", hint=f"use one of {', '.join(map(repr, map(str, kind)))}")
    return kind(value)
