"""The API of a training script: one context manager around the training loop, which then survives faults.

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
*Fails by* ConfigError and DataError for mistakes of the script, StorageError for a directory that cannot be
written at the start, CheckpointError for what cannot be resumed, RoundBrokenError when a peer is lost; SystemExit 143
when stopped, 73 when the last save failed and ``require_last_save`` was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel

from elastic_trainer import settings, torch_internals
from elastic_trainer.checkpoint import Retention
from elastic_trainer.checkpoint.storage import checked
from elastic_trainer.data import seeds
from elastic_trainer.data.plan import EpochPlan, LrRule
from elastic_trainer.data.sampler import Batch, Collate, Fetcher, LoaderSource, SessionSampler
from elastic_trainer.data.sources import Streams, checked_length, is_stream
from elastic_trainer.data.workers import Loading
from elastic_trainer.errors import ConfigError, last_line
from elastic_trainer.model import Cursor, Phase
from elastic_trainer.telemetry import logs
from elastic_trainer.worker import alone, evaluation
from elastic_trainer.worker.comm import groups
from elastic_trainer.worker.comm.control import (
    JSON,
    TENSOR,
    Codec,
    Control,
    Purpose,
    bytes_of,
    is_collective_failure,
    origin,
    packed_tensor,
    unpacked_tensor,
)
from elastic_trainer.worker.comm.groups import self_started
from elastic_trainer.worker.comm.lasting import ShardLayout, checked_shape, nodes_of_job
from elastic_trainer.worker.model.local import LocalSgd
from elastic_trainer.worker.model.replica import DataPart, Reduction, Use, WrappedModel, check_bare, refuse_ddp
from elastic_trainer.worker.model.several import together
from elastic_trainer.worker.process import Process, keep, leave_forks, watch_forks
from elastic_trainer.worker.state.restore import packed, unpacked
from elastic_trainer.worker.state.saver import Cadence
from elastic_trainer.worker.state.training_state import OptimizerSet, Position, SchedulerSet, Stateful, check_part
from elastic_trainer.worker.steps.engine import BoundaryAction, ManualStep, Step, WorkerContext
from elastic_trainer.worker.steps.options import CheckOptions, GroupOptions, SavingOptions, SessionOptions, as_asked
from elastic_trainer.worker.steps.training import Training, Wrapped

Result = TypeVar("Result")
LEAVING_S = 10.0
"""How long a session that fails or is stopped waits for what is still being written."""


_OPEN: list[Session] = []


class Session:
    """The context manager around a training loop: it resumes, divides the data, averages, saves and recovers.

    Attributes:
        environment: What the launcher says of this process; none of it changes.

    Args:
        checkpoint_dir: Where the state is saved and resumed from: a path or a URL; `None`: nothing is saved, which
            `checkpoint.disabled` in the log says under a launcher.
        seed: Of the order of the data and of all random numbers; from 0.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; `auto` takes CUDA device number `local_rank` if there is one.
        checkpoint_every_steps: Save after each N steps.
        checkpoint_every_s: Save when N seconds have passed since the last save; `"auto"`: as often as pays.
        keep_last: How many of the newest checkpoints stay.
        init_method: For processes that were started without torchrun: `tcp://HOST:PORT` of rank 0's machine, or
            `env://`.
        rank: Number of this process among all, with `init_method`.
        world_size: How many processes there are, with `init_method`.
        allow_changed: Names of what a resumed job may have changed: `length`, `global_batch`, `micro_batch`, `seed`,
            `shuffle`, `scale_from`, `lr_rule`, `drop_last`, `arithmetic` (samples may then repeat or be missed), `run`,
            the `--rdzv-id` that it was saved under, and settings such as `optimizer.lr` or `scheduler`.
        saving: More about the checkpoints.
        checks: What the session looks for while it trains.
        group: How the ranks work together.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path | None = None,
        seed: int = 0,
        device: str = "auto",
        checkpoint_every_steps: int | None = None,
        checkpoint_every_s: float | str | None = 60.0,
        keep_last: int = 3,
        *,
        init_method: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        allow_changed: Collection[str] = (),
        saving: SavingOptions = SavingOptions(),
        checks: CheckOptions = CheckOptions(),
        group: GroupOptions = GroupOptions(),
    ) -> None:
        logs.install_hook()
        options = SessionOptions(
            directory=checked(checkpoint_dir) if checkpoint_dir is not None else None,
            cadence=Cadence(checkpoint_every_steps, checkpoint_every_s),
            retention=saving.retention or Retention(keep_last, saving.keep_every),
            seed=seed,
            device=device,
            allow_changed=frozenset(allow_changed),
            saving=saving,
            checks=checks,
            group=group,
        )
        options = as_asked(options)
        self._options = options
        self.environment = self_started(settings.worker_environment(), init_method, rank, world_size)
        self._position = Position()
        self._process: Process | None = None
        self._training: Training | None = None
        """None before the model is wrapped."""
        self._foreign = False
        """Whether this process was forked from the one that trains."""
        self._user: dict[str, Stateful] = {}
        self._pending: dict[str, Any] = {}
        self._layout: ShardLayout | None = None
        """None without a device mesh."""
        self._driven: ManualStep | None = None
        """The last step that the script began itself."""
        self._show_ranks: Callable[[], None] | None = None

    # ---- opening and closing

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            logs.configure()
        self._process = process = Process(self._options, self.environment, self._position)
        watch_forks(self._disown)
        torch_internals.check_before_ddp(lambda module: refuse_ddp(module) if _OPEN else None)
        try:
            process.meet()
        except BaseException:
            self._close(process, "failed")
            raise
        _OPEN.append(self)
        return self

    @staticmethod
    def opened() -> Session:
        """The session that is open in this process (a static method)."""
        if not _OPEN:
            raise ConfigError("no session is open", hint="use it inside `with Session(...) as session:`")
        return _OPEN[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if self._foreign or process is None:
            return
        whole = self._training is None or not self._training.steps.dirty
        if isinstance(error, SystemExit) and not error.code and whole:
            error = None  # by sys.exit() a script says that it has done its work
        if error is None and not process.context.left_as:
            try:
                if self._training is None:
                    self._finish()
                else:
                    self._training.recovery.call(self._finish, JSON)
            except BaseException as failed:
                self._fail(process, failed)
                raise
            self._close(process, "done")
        else:
            self._fail(process, error)

    def _fail(self, process: Process, error: BaseException | None) -> None:
        """Leave without waiting for peers: some of them may be gone, or at another point. ConfigError if they are."""
        parted = self._training.parted_by(error) if self._training is not None else None
        shown = parted or error
        if shown is not None and is_collective_failure(shown):
            process.context.tracker.set_notes(lost_peer=True)
        elif shown is not None and not isinstance(shown, SystemExit):
            process.context.tracker.set_notes(error=last_line(shown), fault=origin(shown))
        self._close(process, process.context.left_as or "failed")
        if parted is not None:
            raise parted from error

    def _finish(self) -> None:
        """All ranks have come to the end: save what is not saved, and leave together."""
        context = self._here
        context.tracker.enter_now(Phase.ENDING)
        context.signals.note_stop()
        if self._training is not None:
            self._training.steps.finish()
        context.present.boundaries.end()
        context.present.boundaries.save_last("done")
        context.present.control.sum(Purpose.FINISH)

    def _disown(self) -> None:
        """In a child that the script has forked: nothing of the session is its own."""
        if self._process is not None:
            self._process.disown()
        if self._training is not None:
            keep(self._training)
            self._training.steps.disown()
        self._process, self._training, self._foreign = None, None, True

    def _close(self, process: Process, status: str) -> None:
        leave_forks(self._disown)
        if self._show_ranks is not None:
            self._show_ranks()
        if self in _OPEN:
            _OPEN.remove(self)
        if self._training is not None:
            self._training.close(None if status == "done" else LEAVING_S)
        process.close(status)

    def hide_ranks(self) -> None:
        """Let frameworks believe that this process is alone, until the session is closed.

        The variables of torchrun, SLURM and MPI are gone until then, and ``torch.distributed.is_initialized()`` is
        false. Call it before they look: before ``TrainingArguments``, ``Accelerator``, Lightning's ``Trainer``.
        Whether this process is the one that reports is still said by :attr:`is_rank0`.
        """
        self._require_open()
        if self._show_ranks is None:
            self._show_ranks = alone.hide()

    def on_ranks_changed(self, fn: Callable[[], object]) -> None:
        """Call ``fn()`` whenever this process has a (new) rank among (other) ranks, and now if it has one.

        They hold one state then; ``fn`` makes no collectives.
        """
        context = self._here
        context.watching.append(fn)
        if self._training is not None:
            fn()

    # ---- where this process is: asks no other rank

    def _require_open(self) -> Process:
        """ConfigError unless this process has opened the session."""
        if self._foreign:
            raise ConfigError(
                "this process was forked from the one that trains, and has no part in its session",
                hint="use the session in the process that opened it",
            )
        if self._process is None:
            raise ConfigError("the session is not open", hint="use it as `with Session(...) as session:`")
        return self._process

    @property
    def _here(self) -> WorkerContext:
        return self._require_open().context

    @property
    def _trained(self) -> Training:
        if self._training is None:
            self._require_open()
            raise ConfigError("there is no model yet", hint="call session.wrap(model, optimizer=...) first")
        return self._training

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self._here.present.control.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return self.environment.local_rank

    @property
    def world_size(self) -> int:
        """How many processes train together. In place it is known from :meth:`wrap` on."""
        return self._here.present.control.world_size

    @property
    def is_rank0(self) -> bool:
        """Whether this process saves and reports; changes with the ranks. In place it is known from :meth:`wrap` on."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """A `torch.device`: what this process computes on."""
        return self._here.placement.device

    @property
    def round(self) -> int:
        """The generation of the state: grows each time the job resumes, and is at least the launcher's round."""
        return self._position.generation

    @property
    def round_reason(self) -> str:
        """Why the present round was formed ("node n2 was lost", say); empty where that is not known, as before
        :meth:`wrap` in place."""
        return self._here.present.group.formation.reason

    @property
    def step_number(self) -> int:
        """Committed steps."""
        return self._position.step

    @property
    def cursor(self) -> Cursor:
        """`epoch` and `samples` of it that are committed, job-wide."""
        return self._position.cursor

    @property
    def within_epochs(self) -> bool:
        """Whether the body of ``session.epochs()`` is running."""
        return self._here.feed.within_epochs

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """The metrics of the last state saved as best."""
        return dict(self._position.best)

    @property
    def resumed_from(self) -> str | None:
        """The name of the checkpoint that this life began from, or None: it began at step 0, or with a peer's state."""
        return self._training.origin.name if self._training is not None else None

    # ---- the model

    def init_device_mesh(
        self, shape: Sequence[int], *, mesh_dim_names: Sequence[str], whole_job: bool = False
    ) -> DeviceMesh:
        """A mesh over processes of this node, to shard the model with; replicas on other nodes are the session's.

        As torch's, but before any rank is known, and for all rounds. -1 is what the other dimensions leave of the
        node's processes; alone (without torchrun) each dimension is 1. ``whole_job``: over the processes of all nodes,
        without replicas; not in place. All ranks call it alike, once, before :meth:`wrap`.
        """
        context, environment = self._here, self.environment
        if self._layout is not None:
            raise ConfigError("a second device mesh", hint="make one mesh, and take parts of it: mesh['tp']")
        torch_internals.require(torch_internals.SHARDED)
        size, launched, device = environment.local_world_size, environment.launched, context.placement.device
        nodes = nodes_of_job(environment) if whole_job else environment.shard_nodes
        sizes, names = checked_shape(shape, mesh_dim_names, size, nodes, launched=launched, whole_job=whole_job)
        taken = environment.shard_place
        node = environment.rank // size % nodes if taken is None else taken
        self._layout = ShardLayout(device.type, sizes, names, node * size + environment.local_rank, size)
        if device.type == "cuda":
            torch_internals.seed_shards(self._options.seed, self._layout.mesh)
        return self._layout.mesh

    @contextmanager
    def parallelizing(self) -> Iterator[None]:
        """Apply ``parallelize_module(..., src_data_rank=None)`` and ``fully_shard(...)`` in here, with the mesh."""
        device, layout = self._here.placement.device, self._layout
        if layout is None:
            raise ConfigError("there is no device mesh yet", hint="call session.init_device_mesh(...) first")
        with layout.parallelizing():
            yield
        if device.type == "cpu":  # where DTensor gives shards no random numbers of their own
            seeds.seeder(device)(seeds.key(seeds.START, self._options.seed, layout.shard_rank))

    def wrap(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        *,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        sync_batchnorm: bool = False,
        reduction: str = Reduction.DDP,
        sync_every: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        average: float | AveragedModel | None = None,
        ddp_options: Mapping[str, Any] | None = None,
        stage: Any = None,
    ) -> WrappedModel:
        """Put ``model`` on the device, resume it, and return what to call: averaged over ranks, if there are several.

        All ranks call it alike, once, before the first step.

        What it returns is of one type, alone and at any number of ranks. Calling it averages gradients; all else is the
        bare model's: its attributes and methods, the names of its parameters and its state dict, also if the model was
        compiled. Buffers follow rank 0.

        Several models or optimizers are given by name, and schedulers too. Such a step commits at the end of its block,
        all or nothing.

        Args:
            model: One module that holds everything that is trained, on any device; or several by name.
            optimizer: Made of the model's parameters; call its `step()` once in each `session.step()`; or several by
                name. Gradients are dropped when a step begins.
            scheduler: Advanced after each committed step; do not step it yourself. Not a `ReduceLROnPlateau`.
            scaler: A `torch.amp.GradScaler`, for fp16; `step.backward` scales, `optimizer.step()` unscales and adapts
                the scale (`scaler.step(optimizer)` works too).
            sync_batchnorm: BatchNorm over the samples of all ranks, on CPUs too.
            reduction: `ddp` (fast), or `tree`: the same bits at any number of ranks; needs `micro_batch_size`; or, for
                slow links, `local_sgd` and `diloco`.
            sync_every: With `local_sgd` and `diloco`: how many steps ranks train apart.
            outer_lr: With `diloco`: learning rate of the outer SGD; 0.7 if not given.
            outer_momentum: With `diloco`: its Nesterov momentum; 0.9 if not given.
            average: Decay of a moving average of the parameters (0.999, say), or a
                `torch.optim.swa_utils.AveragedModel`.
            ddp_options: For `DistributedDataParallel`, such as `{"find_unused_parameters": True}`.
                `gradient_as_bucket_view` is on unless you say otherwise: `parameter.grad` is then overwritten by the
                next backward pass, so clone what you keep, and cannot be detached in place.
            stage: This rank's `PipelineStage`, or a list of them, where the model is computed in stages.
        """
        process, how = self._require_open(), settings.one_of(Reduction, reduction, "reduction")
        if self._training is not None:
            raise ConfigError(
                "session.wrap() was called before", hint="wrap all models in one call: wrap({'name': model, ...}, ...)"
            )
        if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
            model = together(model) if isinstance(model, Mapping) else model
            optimizer = OptimizerSet(optimizer if isinstance(optimizer, Mapping) else {"optimizer": optimizer})
        check_bare(model)
        scheduler = SchedulerSet(scheduler) if isinstance(scheduler, Mapping) else scheduler
        self._training = Training(
            process.context,
            Wrapped(
                model,
                optimizer,
                scheduler,
                scaler,
                sync_batchnorm,
                how,
                LocalSgd.of(how, sync_every, outer_lr, outer_momentum),
                average,
                ddp_options or {},
                self._layout,
                () if stage is None else tuple(stage) if isinstance(stage, Sequence) else (stage,),
                self._user,
                self._pending,
            ),
            process.recovery,
        )
        self._training.recovery.begin()
        if self._options.directory is None and self.environment.launched and self.is_rank0:
            effect = "the session saves nothing: if all workers end at once, what they trained is lost"
            logs.logger().warning("checkpoint.disabled", effect=effect, hint="give Session a checkpoint_dir")
        return self._training.replica.runner

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped, without what averages its gradients: to export, or to use on one rank alone."""
        return self._trained.replica.module

    @property
    def average(self) -> nn.Module:
        """The model with the averaged parameters, if `wrap` was asked to keep them; its buffers are those of its
        `AveragedModel` (after `update_bn`, or with `use_buffers=True`), also while it is evaluated."""
        averaged = self._trained.state.average
        if averaged is None:
            raise ConfigError("no average is kept", hint="say session.wrap(..., average=0.999)")
        return averaged.module

    def register(self, name: str, part: Stateful) -> None:
        """Save and resume ``part`` too, before or after :meth:`wrap`; its state must be the same on all ranks.

        All ranks call it alike, not inside a step.

        In place a rank may receive the state of another that is one collective ahead: change ``part`` only after the
        collectives that follow a step (``step.loss``, ``save``, ...).
        """
        if self._training is not None:
            self._training.state.register(name, part)
        else:
            check_part(name, part, self._user)
            self._user[name] = part

    # ---- data

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs from the cursor's to ``total - 1``; the cursor moves on when the body of one ends.

        A life that resumes behind the last step of an epoch runs what is left of the body, with no batch; behind a
        :meth:`save` there, it begins with the next epoch. All ranks call it alike.
        """
        return self._here.feed.epochs(total)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        passes: int | None = None,
        shuffle: bool = True,
        scale_from: int | None = None,
        lr_rule: str = LrRule.NONE,
        collate: Collate | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        bad_samples: str = "raise",
        max_bad_fraction: float = 0.01,
        multiprocessing_context: str | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """This rank's part of each global batch from the cursor on: of the present epoch, or of all up to ``epochs``.

        All ranks call it alike, with the same arguments, not inside a step.

        A batch comes again until a step has committed it. The global batch is the same at any number of ranks. With
        ``scale_from=R`` it is the one for R ranks, and with W ranks W / R times as large (rounded); the learning rate
        that the optimizer has is then multiplied by what ``lr_rule`` says for each update. Both are kept in the
        checkpoint.

        Random numbers drawn for a sample are keyed by (seed, epoch, sample), so its augmentation does not depend on
        where it is drawn; a data set with ``deterministic = True`` draws none, one with ``generators = ("random",)``
        draws from that one alone (of "random", "numpy", "torch") and costs less. ``set_epoch(epoch)`` is called for
        each epoch, in every process, if the data set has it. Data workers hold the data set as it was at the first
        batch, and none of its sockets; plain tensors are always taken directly.

        Bad samples that are left out are logged and counted (``skipped_samples``), and the gradient is that of the sum
        over the samples present, divided by the planned size of the global batch. DataError when more than
        ``max_bad_fraction`` of this rank's samples of an epoch (and more than 8) are bad, or all of a micro-batch.

        Args:
            dataset: Map-style (`__len__`, `__getitem__`; item i is always the same), or a `SeekableStream` or `Streams`
                with `shuffle=False`.
            global_batch_size: Samples for each optimizer step over all ranks, whatever their number.
            micro_batch_size: Most samples in one forward pass; see `step.micro_batches`.
            passes: Cut each rank's part of a whole global batch into that many micro-batches, at any number of ranks,
                as frameworks count them; in place of `micro_batch_size`.
            shuffle: Another order each epoch, from (seed, epoch) alone.
            scale_from: R: `global_batch_size` is meant for R ranks, and grows and shrinks with their number.
            lr_rule: What the learning rate is multiplied by then: `linear`, `sqrt`, `none`.
            collate: From a list of samples to a batch; by default torch's.
            epochs: Draw all epochs up to this one; without it and `steps`, the present one of `session.epochs`.
            steps: In place of `epochs`: as many epochs as it takes until the run, with all its lives, has made that
                many steps.
            workers: Processes of each rank that fetch samples ahead.
            prefetch: Micro-batches that each of them fetches ahead.
            pin_memory: Copy through pinned memory; `None`: when the device is CUDA.
            bad_samples: `raise`, or `skip`: leave out samples that raise, and count them.
            max_bad_fraction: Of this rank's samples of an epoch that may be bad; up to 8 always may.
            multiprocessing_context: `fork`, `spawn` or `forkserver`.
            drop_last: Leave out the samples at the end of an epoch's order that do not fill a global batch (with
                `passes`: one pass, `global_batch_size / passes`); otherwise the last batch is smaller.
        """
        change, rule = self._trained.recovery.make_change, settings.one_of(LrRule, lr_rule, "lr_rule")
        length, seed = checked_length(dataset), self._options.seed
        size, micro = global_batch_size, micro_batch_size
        plan = EpochPlan(length, size, micro, seed, shuffle, scale_from, rule, passes, drop_last)
        loading = Loading(workers, prefetch, pin_memory, bad_samples, max_bad_fraction, multiprocessing_context)
        if isinstance(dataset, Streams):
            change = self._reading(dataset, plan, loading, epochs)
        return self._here.feed.batches(dataset, plan, collate, epochs, steps, loading, change)

    def _reading(self, streams: Streams, plan: EpochPlan, loading: Loading, epochs: int | None) -> Callable[[], bool]:
        """Keep where ``streams`` are with the state; what is to be called before a batch is drawn."""
        if epochs is not None or self.within_epochs:
            raise ConfigError("streams have no end, and so no epochs", hint="say steps=N")
        for option, given in (
            ("scale_from", plan.scale_from is not None),
            ("workers", loading.workers > 0),
            ("bad_samples='skip'", loading.bad_samples != "raise"),
        ):
            if given:
                raise ConfigError(
                    f"{option} does not go with Streams",
                    hint="leave it out; a stream may read ahead itself, as torchdata's StatefulDataLoader does",
                )
        self._trained.replica.check(Use.STREAMS)
        if self._trained.state.user.get(streams.name) is not streams:
            self.register(streams.name, streams)
        streams.begin(plan.global_batch)
        change, position = self._trained.recovery.make_change, self._position

        def changed() -> bool:
            if change():
                return True
            if streams.due(position.step):
                self._exchange(streams)
            return False

        return changed

    def _exchange(self, streams: Streams) -> None:
        """All ranks know the states of all ``streams`` behind the last step."""
        context, position = self._here, self._position

        def attempt() -> dict[str, Any]:
            control = context.present.control
            with control.agreed():
                mine = packed(streams.mine(position.cursor.samples))
            return {"ranks": [unpacked(each) for each in control.gather_bytes(mine)]}

        streams.exchanged(position.step, self._repeated(attempt, Codec(packed, unpacked))["ranks"])

    def sampler(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        passes: int | None = None,
        shuffle: bool = True,
        scale_from: int | None = None,
        lr_rule: str = LrRule.NONE,
        drop_last: bool = False,
    ) -> SessionSampler:
        """The batch sampler of a DataLoader of your own, or of torchdata's StatefulDataLoader.

        All ranks call it alike. Its length is the number of steps of an epoch.

        ``DataLoader(dataset, batch_sampler=sampler, ...)``, then ``for batch in sampler.batches(loader, epochs=N)``.
        The arguments are those of :meth:`batches`; ``dataset`` is map-style.
        """
        if is_stream(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} is a stream, whose samples have no numbers for a sampler",
                hint="give it to session.batches(..., shuffle=False)",
            )
        training, rule = self._trained, settings.one_of(LrRule, lr_rule, "lr_rule")
        length, seed, feed = checked_length(dataset), self._options.seed, self._here.feed
        size, micro = global_batch_size, micro_batch_size
        plan = EpochPlan(length, size, micro, seed, shuffle, scale_from, rule, passes, drop_last)

        def begin(source: LoaderSource, epochs: int | None, steps: int | None) -> Iterator[Batch]:
            return feed.batches(dataset, plan, None, epochs, steps, source, training.recovery.make_change)

        return SessionSampler(dataset, plan, self.device, begin)

    @property
    def skipped_samples(self) -> int:
        """How many samples this process has left out because they raise."""
        return self._here.feed.tally.total

    # ---- steps

    def step(self) -> Step:
        """The `Step` about the batch at hand, as a context manager. All ranks call it alike."""
        return self._trained.steps.begin(Step)

    def begin_step(self) -> ManualStep:
        """:meth:`step` without a block, for loops of others; ``step.end()`` closes it. All ranks call it alike.

        A step whose ``end()`` returns False is repeated by drawing the next batch, which is the same one.
        """
        if self._driven is not None and not self._driven.ended:
            raise ConfigError("begin_step() before the end of the last step", hint="call step.end() first")
        self._driven = self._trained.steps.begin(ManualStep)
        return self._driven

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body may take long: ``name`` is "evaluation" or "checkpoint".

        Metrics show it apart, and the watchdog allows it ``phase_timeout`` instead of the time of a step.
        """
        if name not in (Phase.EVALUATION, Phase.CHECKPOINT):
            raise ConfigError(f"phase is {name!r}", hint="use 'evaluation' or 'checkpoint'")
        with self._here.tracker.during(Phase(name)):
            yield

    # ---- between steps; all ranks must call these together

    def save(
        self, metrics: Mapping[str, float] | None = None, best: bool = False, wait: bool | None = None
    ) -> str | None:
        """Copy the state, to be written beside training; the checkpoint's name, on all ranks.

        All ranks call it alike, not inside a step.

        With ``wait`` (the default for the ``best``) it is durable when this returns. None without a ``checkpoint_dir``,
        or where it refuses meanwhile (full, read-only, ...). A save that fails is logged and counted, and the training
        goes on.

        In the body of :meth:`epochs`, behind its loop over batches, it closes the epoch: a life that resumes there
        begins with the next one. So make it the last thing in the body.
        """
        return self._trained.save(metrics, best=best, wait=best if wait is None else wait)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        batch_size: int,
        fn: evaluation.Measure,
        *,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """``{name: sum / count}`` over ``dataset``, each sample once; ``fn(model, batch) -> {name: (sum, count)}``.

        The model is in eval mode meanwhile, without gradients. All ranks call it alike, not inside a step.
        """
        return self._evaluated(model, dataset, batch_size, collate, partial(evaluation.evaluate, measure=fn), JSON)

    def predict(
        self,
        model: nn.Module,
        dataset: Any,
        batch_size: int,
        fn: evaluation.Predict,
        *,
        collate: Collate | None = None,
    ) -> torch.Tensor:
        """What ``fn(model, batch)`` gives, a row for each sample, for all of ``dataset``, in its order, on all ranks.

        On the CPU; for metrics that need all predictions at once, such as average precision. Shape: (length, *row).
        The model is in eval mode meanwhile, without gradients. All ranks call it alike, not inside a step.
        """
        return self._evaluated(model, dataset, batch_size, collate, partial(evaluation.predict, fn=fn), TENSOR)

    def _evaluated(
        self,
        model: nn.Module,
        dataset: Any,
        batch_size: int,
        collate: Collate | None,
        method: Callable[..., Result],
        codec: Codec,
    ) -> Result:
        """``method(module, fetch, batch_size, control=..., turn=..., part=...)`` of the bare ``model``."""
        context, training = self._here, self._training

        def turn() -> None:
            context.report()
            context.tracker.moved()
            boundaries = context.present.boundaries
            if boundaries.cross() is BoundaryAction.STOP:
                boundaries.stop()

        def attempt() -> Result:
            present, fetch = context.present, Fetcher(dataset, context.placement.device, collate)
            context.tracker.enter_now(Phase.EVALUATION)
            present.control.sum(Purpose.EVALUATE)
            module, part = model, DataPart(present.control.rank, present.control.world_size)
            if training is not None:
                average = training.state.average
                module = training.replica.unwrap(model)
                training.replica.align_buffers(present.control, None if average is None else average.module)
                part = training.replica.part(present.control)
            present.boundaries.begin_phase()
            result = method(module, fetch, batch_size, control=present.control, turn=turn, part=part)
            present.boundaries.begin_phase()
            return result

        lasting: AbstractContextManager[None] = nullcontext()
        if training is not None:
            training.refuse_inside("evaluate() or predict()")
            lasting = training.recovery.deferring_changes()
        with context.tracker.during(Phase.EVALUATION), lasting:
            return self._repeated(attempt, codec)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place; shape and dtype alike. All ranks call it alike."""
        context, training = self._here, self._training
        if not context.present.group.formed or context.present.control.alone:
            return tensor
        if training is None or training.steps.inside or not training.recovery.led:
            groups.all_reduce(context.present.control, tensor)  # a step that fails is repeated as a whole
            return tensor
        before = tensor.clone()

        def attempt() -> torch.Tensor:
            tensor.copy_(before)
            if not context.present.control.alone:
                groups.all_reduce(context.present.control, tensor)
            return tensor

        return self._repeated(attempt, bytes_of(tensor))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ``tensor`` of all ranks, by rank; shape (world_size, *shape). All ranks call it alike."""
        self._require_open()
        mine = packed_tensor(tensor)
        rows = self._shared(lambda control: torch.stack([unpacked_tensor(each) for each in control.gather_bytes(mine)]))
        return rows.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Fill `tensor` with that of rank `source`. All ranks call it alike."""
        self._require_open()
        mine = packed_tensor(tensor)
        value = self._shared(lambda control: unpacked_tensor(control.broadcast_bytes(mine, source)))
        with torch.no_grad():
            return tensor.copy_(value)

    def barrier(self) -> None:
        """Wait for all ranks. All ranks call it alike."""
        self._shared(lambda control: control.sum(Purpose.BARRIER), JSON)

    def _shared(self, ask: Callable[[Control], Result], codec: Codec = TENSOR) -> Result:
        """A step that fails is repeated as a whole, so inside one this is made once."""
        context, training = self._here, self._training
        if training is None or training.steps.inside:
            return ask(context.present.control)
        return training.repeated(lambda: ask(context.present.control), codec)

    def _repeated(self, attempt: Callable[[], Result], codec: Codec) -> Result:
        """In place: again after each round that ends in the middle of it, or the result of a peer that completed it."""
        return attempt() if self._training is None else self._training.repeated(attempt, codec)
