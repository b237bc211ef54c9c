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
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel

from elastic_trainer import settings, torch_internals
from elastic_trainer.checkpoint import Retention
from elastic_trainer.checkpoint.storage import checked
from elastic_trainer.data.sampler import Collate
from elastic_trainer.errors import ConfigError, last_line
from elastic_trainer.model import Phase
from elastic_trainer.telemetry import complaints, logs
from elastic_trainer.worker import alone, evaluation, forks
from elastic_trainer.worker.comm.codecs import JSON, TENSOR
from elastic_trainer.worker.comm.control import Purpose
from elastic_trainer.worker.comm.failures import is_collective_failure
from elastic_trainer.worker.comm.round_place import self_started
from elastic_trainer.worker.feeding import SessionData
from elastic_trainer.worker.model.local import Apart
from elastic_trainer.worker.model.replica import Reduction
from elastic_trainer.worker.model.several import together
from elastic_trainer.worker.model.wrapped import WrappedModel, check_bare, refuse_ddp
from elastic_trainer.worker.process import Process
from elastic_trainer.worker.state.cadence import Cadence
from elastic_trainer.worker.state.optimizer_set import OptimizerSet, SchedulerSet
from elastic_trainer.worker.steps.driven import DrivenStep
from elastic_trainer.worker.steps.meshes import Meshes
from elastic_trainer.worker.steps.options import CheckOptions, GroupOptions, SavingOptions, SessionOptions, one_of
from elastic_trainer.worker.steps.replicas import Wrapped
from elastic_trainer.worker.steps.step import Step

LEAVING_S = 10.0
"""How long a session that fails or is stopped waits for what is still being written."""


_OPEN: list[Session] = []


class Session(SessionData):
    """See the module. ``checkpoint_dir`` is a path or an ``s3://``, ``gs://`` or ``az://`` URL; None: nothing is saved.

    Else it is saved by steps, by time (see cadence for ``"auto"``) and on SIGUSR1.

    Processes that were started without torchrun meet at ``init_method``, "tcp://host:port" of rank 0's machine, with
    ``rank`` and ``world_size``, as in ``torch.distributed.init_process_group`` (and "env://" as there). Nobody restarts
    them: when one is lost the others fail, and all resume when they are started again.

    ``allow_changed`` names fields (length, global_batch, micro_batch, seed, shuffle, ...) that a resumed job may have
    changed. What is asked for less often is grouped: ``saving``, ``checks`` and ``group``.
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
        complaints.install()
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
        super().__init__(options, self_started(settings.worker_environment(), init_method, rank, world_size))
        self._pending: dict[str, Any] = {}
        self._meshes = Meshes()
        self._driven: DrivenStep | None = None
        """The last step that the script began itself."""
        self._show_ranks: Callable[[], None] | None = None

    # ---- opening and closing

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            logs.configure()
        self._process = process = Process(self._options, self.environment, self._position)
        forks.watch(self._disown)
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
        """The session that is open in this process."""
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
        if error is None and not process.place.stopped:
            try:
                self._all.finished(self._finish)
            except BaseException as failed:
                self._fail(process, failed)
                raise
            self._close(process, "done")
        else:
            self._fail(process, error)

    def _fail(self, process: Process, error: BaseException | None) -> None:
        """Leave without waiting for peers: some of them may be gone, or in another place. ConfigError if they are."""
        parted = self._training.parted_by(error) if self._training is not None else None
        shown = parted or error
        if shown is not None and is_collective_failure(shown):
            process.place.tracker.describe(lost_peer=True)
        elif shown is not None and not isinstance(shown, SystemExit):
            process.place.tracker.describe(error=last_line(shown))
        self._close(process, "stopped" if process.place.stopped else "failed")
        if parted is not None:
            raise parted from error

    def _finish(self) -> None:
        """All ranks have come to the end: save what is not saved, and leave together."""
        place = self._here
        place.tracker.change(Phase.ENDING)
        place.signals.agreed()
        if self._training is not None and self._training.outer is not None:
            self._training.outer.finish()
        place.present.boundaries.end()
        if self._training is not None:
            self._training.save_last("done")
        place.present.control.sum(Purpose.FINISH)

    def _disown(self) -> None:
        """In a child that the script has forked: nothing of the session is its own."""
        if self._process is not None:
            self._process.disown()
        if self._training is not None:
            forks.keep(self._training)
            self._training.steps.disown()
        self._process, self._training, self._foreign = None, None, True

    def _close(self, process: Process, status: str) -> None:
        forks.leave(self._disown)
        if self._show_ranks is not None:
            self._show_ranks()
        if self in _OPEN:
            _OPEN.remove(self)
        if self._training is not None:
            self._training.close(None if status == "done" else LEAVING_S)
        process.close(status)

    def hide_ranks(self) -> None:
        """Let frameworks believe that this process is alone, until the session is closed (see alone.py).

        Call it before they look: before ``TrainingArguments``, ``Accelerator``, Lightning's ``Trainer``. Whether this
        process is the one that reports is still said by :attr:`is_rank0`.
        """
        self._require_open()
        if self._show_ranks is None:
            self._show_ranks = alone.hide()

    def on_ranks_changed(self, fn: Callable[[], object]) -> None:
        """Call ``fn()`` whenever this process has a (new) rank among (other) ranks, and now if it has one.

        They hold one state then; ``fn`` makes no collectives.
        """
        place = self._here
        place.watching.append(fn)
        if self._training is not None:
            fn()

    # ---- the model

    def init_device_mesh(
        self, shape: Sequence[int], *, mesh_dim_names: Sequence[str], whole_job: bool = False
    ) -> DeviceMesh:
        """A mesh over processes of this node, to shard the model with; replicas on other nodes are the session's.

        As torch's, but before any rank is known, and for all rounds. -1 is what the other dimensions leave of the
        node's processes; alone (without torchrun) each dimension is 1. ``whole_job``: over the processes of all nodes,
        without replicas; not in place.
        """
        return self._meshes.make(self._require_open().place, shape, mesh_dim_names, whole_job=whole_job)

    def parallelizing(self) -> AbstractContextManager[None]:
        """Apply ``parallelize_module(..., src_data_rank=None)`` and ``fully_shard(...)`` in here, with the mesh."""
        return self._meshes.parallelizing(self._require_open().place)

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

        ``scheduler`` is advanced at every step. Buffers follow rank 0 (see replica).

        ``reduction`` says how gradients are added up: ``"ddp"``, or ``"tree"`` for a training whose bits do not depend
        on the number of ranks. With ``"local_sgd"`` and ``"diloco"`` ranks train apart and average their parameters
        after ``sync_every`` steps; DiLoCo's outer optimizer then makes a step (SGD with Nesterov momentum, 0.7 and 0.9
        if not given): see :mod:`elastic_trainer.worker.model.local`. ``average`` keeps an exponential moving average
        of the parameters with that decay (or one of your own, from torch.optim.swa_utils), advanced at each step: see
        :attr:`average`.

        Several models or optimizers are given by name, and schedulers too. Such a step commits at the end of its block,
        all or nothing: see :mod:`elastic_trainer.worker.model.several`. ``stage`` is this rank's PipelineStage of a
        ``model`` that is computed in stages, or a list of several: see :mod:`elastic_trainer.worker.model.stages`.
        """
        process, how = self._require_open(), one_of(Reduction, reduction, "reduction")
        if self._training is not None:
            raise ConfigError(
                "session.wrap() was called before", hint="wrap all models in one call: wrap({'name': model, ...}, ...)"
            )
        if isinstance(model, Mapping) or isinstance(optimizer, Mapping):
            model = together(model) if isinstance(model, Mapping) else model
            optimizer = OptimizerSet(optimizer if isinstance(optimizer, Mapping) else {"optimizer": optimizer})
        check_bare(model)
        scheduler = SchedulerSet(scheduler) if isinstance(scheduler, Mapping) else scheduler
        self._training = process.training(
            Wrapped(
                model,
                optimizer,
                scheduler,
                scaler,
                sync_batchnorm,
                how,
                Apart.of(how, sync_every, outer_lr, outer_momentum),
                average,
                ddp_options or {},
                self._meshes.layout,
                () if stage is None else tuple(stage) if isinstance(stage, Sequence) else (stage,),
                self._user,
                self._pending,
            )
        )
        self._training.round_end.begin()
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
        """The model with the averaged parameters, to evaluate or export; not to be trained."""
        averaged = self._trained.state.average
        if averaged is None:
            raise ConfigError("no average is kept", hint="say session.wrap(..., average=0.999)")
        return averaged.module

    # ---- steps

    def step(self) -> Step:
        """The context of one training step about the batch at hand."""
        return self._trained.begin_step(Step)

    def begin_step(self) -> DrivenStep:
        """:meth:`step` without a block, for loops of others; ``step.end()`` closes it (see driven).

        A step whose ``end()`` returns False is repeated by drawing the next batch, which is the same one.
        """
        if self._driven is not None and not self._driven.ended:
            raise ConfigError("begin_step() before the end of the last step", hint="call step.end() first")
        self._driven = self._trained.begin_step(DrivenStep)
        return self._driven

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body may take long: ``name`` is "evaluation" or "checkpoint".

        Metrics show it apart, and the watchdog allows it the time of a long phase instead of that of a step.
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

        With ``wait`` (the default for the ``best``) it is durable when this returns. None without a ``checkpoint_dir``,
        or where it refuses meanwhile (full, read-only, ...). A save that fails is logged and counted, and the training
        goes on.

        In the body of :meth:`epochs`, behind its loop over batches, it closes the epoch: a life that resumes there
        begins with the next one. So make it the last thing in the body.
        """
        return self._all.save(metrics, best=best, wait=best if wait is None else wait)

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

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ``tensor`` of all ranks, by rank; shape (world_size, *shape), the same on all."""
        return self._all.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Fill ``tensor`` with that of rank ``source``."""
        return self._all.broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._all.barrier()
