"""The training loop: read it in a sitting. Before it, what it needs: precision, identity, evaluation, export.

*Runs in* each worker process, main thread. *Owns* the files beside the checkpoints: ``config.yaml``, ``metrics.jsonl``,
and the exported models, which are whole at any moment after they first appeared (``safetensors.torch.load_model`` reads
them back). A rank 0 that froze while it wrote one, and was replaced since, does not overwrite a newer model.
*Fails by* ConfigError, DataError and StorageError before the training begins, and whatever the task raises. Once it is
under way, files that cannot be written are logged.
*Invariant*: what follows a checkpoint depends on the checkpoint, the configuration and the data alone, so a run that
was interrupted ends like one that was not. A job never takes over a state whose numbers (class indices, say) mean
other things to it.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import nn

from elastic_trainer import Batch, CheckOptions, GroupOptions, MapDataset, SavingOptions, SeekableStream, Session
from elastic_trainer.checkpoint import Retention
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.jobs.config import JobConfig, Precision, as_yaml, did_you_mean
from elastic_trainer.jobs.files import HISTORY_FILE, History, beside, make_writable, write_atomically
from elastic_trainer.jobs.loggers import check_loggers
from elastic_trainer.jobs.reporting import ProgressMoment, Reporter
from elastic_trainer.jobs.task import Exhibits, Task, epochs_done, evaluation_due, lengths, run_length
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import named

_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the forward pass computes. ``dtype`` None is plain fp32."""

    device_type: str
    dtype: torch.dtype | None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass and its loss; never of the backward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def scaler(self) -> torch.amp.GradScaler | None:
        """A fresh gradient scaler where small gradients would vanish (fp16), else None: bf16 has fp32's range."""
        return torch.amp.GradScaler(self.device_type) if self.dtype is torch.float16 else None


def arithmetic(precision: Precision, device: torch.device) -> Arithmetic:
    """What ``precision`` means on ``device``; ConfigError where the device cannot compute that way."""
    if precision is Precision.FP16 and device.type != "cuda":
        raise ConfigError("precision fp16 needs a CUDA device", hint="set precision=bf16 or precision=fp32 on the CPU")
    without = device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
    if precision is Precision.BF16 and without:
        raise ConfigError("this CUDA device cannot compute in bf16", hint="set precision=fp16 or precision=fp32")
    return Arithmetic(device.type, _DTYPES.get(precision))


class TaskIdentity:
    """The facts that a task names (:meth:`Task.identity`), registered with the session."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        try:
            self._facts: dict[str, Any] = json.loads(json.dumps(dict(facts)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"identity() gives what JSON cannot say: {error}", hint="name plain values") from error

    def state_dict(self) -> dict[str, Any]:
        return {"facts": self._facts}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError about the first fact that is another here; those that only one side knows are no matter."""
        for name, mine in self._facts.items():
            difference = changed(name, state["facts"].get(name, mine), mine)
            if difference is not None:
                hint = "give the data that the run began with, or begin another one with its own checkpoint.directory"
                raise ConfigError(difference, hint=hint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)


def changed(name: str, was: Any, now: Any) -> str | None:
    """How the fact ``name`` changed, in one sentence; None if it did not. Pure."""
    if was == now:
        return None
    if not all(isinstance(value, Sequence) and not isinstance(value, str) for value in (was, now)):
        return f"'{name}' is {reprlib.repr(now)} here and was {reprlib.repr(was)} when the run began"
    before, after = set(map(str, was)), set(map(str, now))
    added = [str(item) for item in now if str(item) not in before]
    removed = [str(item) for item in was if str(item) not in after]
    if not added and not removed:
        return f"'{name}' has the same entries as when the run began, but in another order or number"
    kinds = (("added", added), ("removed", removed))
    parts = [f"{named(map(reprlib.repr, items), 5)} {verb}" for verb, items in kinds if items]
    return f"'{name}' changed since the run began: {', '.join(parts)}"


EXHIBITED = 8
"""Test samples of which a task may show something."""


def measurable(task: Task, model: torch.nn.Module, dataset: MapDataset) -> list[str]:
    """The names of the task's metrics, found by measuring one sample with ``model`` where it is (on the CPU)."""
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        measured = task.metrics(model, Batch.first(dataset, 1, torch.device("cpu")))
    # One sample may hold nothing to count.
    means = {name: float(total) / (float(count) or 1.0) for name, (total, count) in measured.items()}
    return sorted({**means, **task.implied_metrics(means)})


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, then for each submodule the mode that it had."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


_REFUSALS = (OSError, SafetensorError, RuntimeError, ValueError, TypeError, AttributeError)
"""Of the disk (safetensors has an error of its own for that), and of a state that the format cannot say: buffers that
share parts of their memory, and what get_extra_state() gives."""

FINAL_FILE = "final_state.safetensors"
BEST_FILE = "best_model.safetensors"


def export(module: nn.Module, path: Path, step: int, notes: Mapping[str, object]) -> bool:
    """Replace ``path`` by the state of ``module`` after ``step`` steps; whether that was possible.

    ``step`` and ``notes`` are the file's metadata.
    """
    notes = {"step": step, **notes}
    before = _identity(path)
    try:
        temporary = beside(path)
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        try:
            save_model(module, str(temporary), {key: str(value) for key, value in notes.items()})
            temporary.chmod(mode)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            if _identity(path) != before and (there := exported_step(path)) is not None and there >= step:
                logs.logger().warning("model.exported_by_another", path=str(path), step=step, there=there)
                return False
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except _REFUSALS as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        logs.logger().warning("model.not_exported", path=str(path), error=reason)
        return False
    logs.logger().info("model.exported", path=str(path), **dict(notes))
    return True


def exported_step(path: Path) -> int | None:
    """The step of the model in ``path``; None where there is none that can be read."""
    try:
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Another one after each replacement."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


CONFIG_FILE = "config.yaml"


class Trainer:
    """One job: ``Trainer(MyTask, config).run()``.

    Whatever is wrong with the configuration, the data or the output directory is raised by the constructor, before
    this process waits for any other.

    Attributes:
        task: The task, made with the configuration.
        config: The job file, checked.
        directory: Where its files lie, beside the checkpoints.
        data: The train and test sets of the task.
        model: The bare model.
        mesh: The sizes of the device mesh by name; empty where the model is not sharded.
        length: How long the run is.
    """

    def __init__(self, task: type[Task], config: JobConfig) -> None:
        self.task = task(config)
        self.config = self.task.config
        self.directory = config.checkpoint.files
        device = config.device  # that which the session will choose; if there is none of this type, it says so
        if device == "auto":
            available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
            device = next(kind for kind, there in available.items() if there)
        self.arithmetic = arithmetic(config.precision, torch.device(device))
        self.data = self.task.datasets()
        for each in (self.data.test, self.data.train):
            Batch.first(each, 1, torch.device("cpu"))  # DataError for what is no data set, or has no length
        self.identity = TaskIdentity(self.task.identity())
        self.length = run_length(self.config, len(self.data.train))
        self.mesh = self.task.mesh()
        torch.manual_seed(config.seed)
        with torch.device("meta") if self.mesh else nullcontext():
            self.model = self.task.model()
        self.optimizer, self.scheduler = self._optimization()
        if (wanted := config.checkpoint.metric) is not None:
            names = measurable(self.task, self.task.miniature() if self.mesh else self.model, self.data.test)
            if wanted not in names:
                hint = did_you_mean(wanted, names) or f"the task measures: {', '.join(names)}"
                raise ConfigError(f"checkpoint.metric is '{wanted}', which the task does not measure", hint=hint)
        if config.compile and not self.mesh:
            self.model.compile()  # in place: parameters keep their names, so checkpoints fit with and without
        check_loggers(config.logging.names)
        self._session = self._unopened()
        environment = self._session.environment
        if environment.rank == 0 and not environment.midway:
            make_writable(self.directory)

    def _optimization(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
        optimizer = self.task.optimizer(self.model)
        return optimizer, self.task.scheduler(optimizer, self.length)

    def shard(self, session: Session) -> None:
        """Shard the model, if the task says so: this process never holds more than its part and one whole tensor."""
        if not self.mesh:
            return
        mesh = session.init_device_mesh(tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        with session.parallelizing():
            self.task.parallelize(self.model, mesh)
        self.model.to_empty(device=session.device)
        torch.manual_seed(self.config.seed)
        self.task.init_weights(self.model)
        self.optimizer, self.scheduler = self._optimization()  # of the shards

    def run(self) -> dict[str, Any]:
        """Train; a dict with `task`, `rank`, `world_size`, `round`, `step`, `epoch`, `metrics`, `train_loss`, `best`,
        `resumed_from`, `directory`, `seconds`."""
        began = SYSTEM.monotonic()
        with self._session as session:
            run = Run(self, session)
            try:
                run.train()
            finally:
                run.close()
            return {**run.report(), "seconds": round(SYSTEM.monotonic() - began, 3)}

    def _unopened(self) -> Session:
        """The session with its settings checked; it meets the others when it is opened."""
        checkpoint = self.config.checkpoint
        return Session(
            checkpoint_dir=checkpoint.directory,
            seed=self.config.seed,
            device=self.config.device,
            checkpoint_every_steps=checkpoint.every_steps,
            checkpoint_every_s=checkpoint.every_s,
            allow_changed={*checkpoint.allow_changed, *lengths(self.scheduler)},
            saving=SavingOptions(
                retention=Retention(
                    keep_last=checkpoint.keep_last,
                    keep_every=checkpoint.keep_every,
                    metric=checkpoint.metric,
                    mode=checkpoint.mode,
                ),
                require_last_save=checkpoint.require_last_save,
            ),
            checks=CheckOptions(
                nonfinite=self.config.nonfinite,
                compare_every_steps=self.config.compare_every_steps,
                on_difference=self.config.on_difference,
                audit_every=self.config.audit_every,
                on_mismatch=self.config.on_mismatch,
                on_changed="raise",
            ),
            group=GroupOptions(backend=self.config.backend),
        )


class Run:
    """What happens of a job between the opening and the closing of its session."""

    def __init__(self, trainer: Trainer, session: Session) -> None:
        self.job, self.session, self.config = trainer, session, trainer.config
        self.history = History()
        session.register("history", self.history)
        session.register("identity", trainer.identity)
        trainer.shard(session)
        self.model = session.wrap(
            trainer.model,
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
            scaler=trainer.arithmetic.scaler(),
            sync_batchnorm=self.config.sync_batchnorm,
            reduction=self.config.reduction,
            sync_every=self.config.sync_every,
            outer_lr=self.config.outer_lr,
            outer_momentum=self.config.outer_momentum,
            average=self.config.average,
        )
        self._loss = float("nan")
        if session.resumed_from is not None and self._finished() and self.history.at(session.step_number) is not None:
            self.history.saved_step = session.step_number  # a finished run started again: nothing is left to save
        self._named = False
        if session.is_rank0:
            self._write_history()
        self.reporter = Reporter(self.config.logging, trainer.directory, self.config.model_dump(mode="json"))
        self._lead()

    def _lead(self) -> None:
        """Rank 0 reports, also when it moves."""
        self.reporter.lead(self.session.is_rank0, self._moment(), self.session.round_reason)

    def train(self) -> None:
        self._settle()  # a checkpoint may lie between a step and its evaluation
        for batch in self._batches():
            with self.session.step() as step:
                looks = step.number == 1 or step.number % self.config.logging.loss_every == 0
                if looks:
                    step.want_loss()
                for micro_batch in step.micro_batches(batch):
                    with self.job.arithmetic.autocast():
                        loss = self.job.task.loss(self.model, micro_batch)
                    step.backward(loss)
                if self.config.clip_norm is not None:
                    step.clip(self.config.clip_norm)
                self.job.optimizer.step()
                self.history.add_awaited()  # the loss of an earlier step: read at once, all ranks would wait for all
                if looks and step.committed:
                    seen = self._moment(), self._lr, batch.global_size
                    self.history.await_loss(partial(self._looked, step.later_loss().read, *seen))
            if step.committed:
                self._lead()
                if self.reporter.counted(batch.global_size):
                    self.history.add_awaited()
                    self.reporter.stands(self._moment(), self._loss)
            self._settle()  # even if not committed here: a membership change may have brought a peer's later state
        self._conclude()

    def close(self) -> None:
        """Report what is left: a rank may leave after a step whose loss was not read yet."""
        try:
            self.history.add_awaited()
        finally:
            self.reporter.close(finished=self.history.concluded_step == self.session.step_number and self._finished())

    def report(self) -> dict[str, Any]:
        session, records = self.session, self.history.records
        checkpoint = self.config.checkpoint
        best = self.history.best(checkpoint.metric, checkpoint.mode) if checkpoint.metric is not None else None
        return {
            "task": self.config.task,
            "rank": session.rank,
            "world_size": session.world_size,
            "round": session.round,
            "step": session.step_number,
            "epoch": epochs_done(session.cursor, self.job.length.samples),
            "metrics": dict(records[-1].metrics) if records else {},
            "train_loss": records[-1].train_loss if records else None,
            "best": {"step": best.step, **best.metrics} if best is not None else None,
            "resumed_from": session.resumed_from,
            "directory": str(self.job.directory),
        }

    def _batches(self) -> Iterator[Batch]:
        """This rank's parts of all global batches that are still to be trained on."""
        for _ in self.session.epochs(self.job.length.epochs):
            batches = self.session.batches(
                self.job.data.train,
                global_batch_size=self.config.samples_per_step,
                micro_batch_size=self.config.micro_batch,
                shuffle=not isinstance(self.job.data.train, SeekableStream),
                workers=self.config.workers,
                prefetch=self.config.prefetch,
                pin_memory=self.config.pin_memory,
                bad_samples=self.config.bad_samples,
                max_bad_fraction=self.config.max_bad_fraction,
            )
            if self.session.is_rank0 and not self._named:  # it fits what is resumed: a refused job leaves no trace
                with _logged(CONFIG_FILE):
                    write_atomically(self.job.directory / CONFIG_FILE, as_yaml(self.config))
            self._named = True
            for batch in batches:
                if self._finished():
                    return
                yield batch

    def _finished(self) -> bool:
        return self.job.length.is_over(self.session.cursor, self.session.step_number)

    def _looked(self, later: Callable[[], float | None], moment: ProgressMoment, lr: float, samples: int) -> None:
        """The global loss of the step that ended at ``moment`` should be there by now."""
        loss = later()
        if loss is None:
            return
        self._loss = loss
        self.history.observe(loss, samples)
        self.reporter.looked(moment, loss, lr)

    @property
    def _lr(self) -> float:
        return float(self.job.optimizer.param_groups[0]["lr"])

    def _moment(self) -> ProgressMoment:
        session, length = self.session, self.job.length
        return ProgressMoment(
            step=session.step_number,
            steps=length.steps,
            epoch=epochs_done(session.cursor, length.samples),
            world_size=session.world_size,
            round=session.round,
        )

    def _settle(self) -> None:
        """Evaluate and save what is due where the run stands.

        Decided by the shared state alone, so that ranks which have just got it from a peer decide alike.
        """
        step, cursor = self.session.step_number, self.session.cursor
        if evaluation_due(self.config.evaluation, self.job.length, cursor, step) and self.history.at(step) is None:
            self._evaluate()
        if self._save_due():
            self._save()
        else:
            self._make_up()

    def _make_up(self) -> None:
        """Write the exports that an earlier rank 0 did not get to, while the run stands at the saved step."""
        step = self.session.step_number
        if self.history.saved_step != step or not self._exports:
            return
        last, missing = self.history.at(step), [each for each in self._exported if exported_step(each) != step]
        if last is not None and missing:
            self._export(missing, last.metrics)

    def _conclude(self) -> None:
        """After the last step: once all ranks are here none writes any more, and rank 0 may have moved meanwhile."""
        step = self.session.step_number
        if self.history.concluded_step != step:  # else the others, who gave this rank its state, have met already
            self.session.barrier()
            self.history.concluded_step = step
        self._make_up()
        if self.session.is_rank0:
            self._write_history()

    def _save_due(self) -> bool:
        step = self.session.step_number
        undone = self.history.at(step) is not None and self.history.saved_step != step
        return undone and (self._is_best() or self._finished())

    def _evaluate(self) -> None:
        self.history.add_awaited()  # else the loss would be reported after the evaluation, with its speed
        step, cursor, length = self.session.step_number, self.session.cursor, self.job.length
        task, size = self.job.task, self.config.evaluation.batch_size

        def measured(module: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
            with self.job.arithmetic.autocast():
                return task.metrics(module, batch)

        model = self.model if self.config.average is None else self.session.average
        means = self.session.evaluate(model, self.job.data.test, size, measured)
        metrics = {**means, **task.implied_metrics(means)}
        if self.session.step_number != step or self.history.at(step) is not None:
            return  # a membership change meanwhile: all went back to a checkpoint, or a peer's history has it already
        done = epochs_done(cursor, length.samples)
        self.history.add(step, done, cursor.samples % length.samples, self._lr, metrics)
        self._lead()  # rank 0 may have moved here in the middle of it
        with self.session.phase("evaluation"):
            self.reporter.evaluated(self._moment(), metrics, self._exhibits())
            if self.session.is_rank0:
                self._write_history()

    def _exhibits(self) -> Exhibits:
        if not self.reporter.wants_exhibits or self.job.mesh:  # no rank can compute a sharded model alone
            return Exhibits()
        job, model = self.job, self._result
        try:
            with evaluating(model), torch.no_grad(), job.arithmetic.autocast():
                return job.task.exhibits(model, Batch.first(job.data.test, EXHIBITED, self.session.device))
        except Exception:  # noqa: BLE001 - the edge to a task's own code, on one rank alone: a picture ends no training
            logs.logger().exception("exhibits.failed", task=self.config.task, step=self.session.step_number)
            return Exhibits()

    @property
    def _result(self) -> torch.nn.Module:
        """The evaluated model, without its DDP wrapper."""
        return self.session.module if self.config.average is None else self.session.average

    def _is_best(self) -> bool:
        checkpoint = self.config.checkpoint
        best = self.history.best(checkpoint.metric, checkpoint.mode, kept=True) if checkpoint.metric else None
        return best is not None and best.step == self.session.step_number

    def _save(self) -> None:
        last = self.history.at(self.session.step_number)
        metrics = dict(last.metrics) if last is not None else {}
        name = self.session.save(metrics=metrics, best=self._is_best())
        self.history.saved_or_refused(
            self.session.step_number, saved=name is not None
        )  # afterwards: who joins meanwhile saves
        if self._exports:
            self._export(self._exported, metrics)

    @property
    def _exports(self) -> bool:
        """Not of a sharded model, which rank 0 does not hold: ``elastic-trainer checkpoints export`` reads it whole."""
        return self.session.is_rank0 and self.config.checkpoint.export and not self.job.mesh

    @property
    def _exported(self) -> list[Path]:
        """The files that hold the model as it is now."""
        names = [BEST_FILE] * self._is_best() + [FINAL_FILE] * self._finished()
        return [self.job.directory / name for name in names]

    def _export(self, paths: Sequence[Path], metrics: Mapping[str, float]) -> None:
        with self.session.phase("checkpoint"):
            for path in paths:
                export(self._result, path, self.session.step_number, {"task": self.config.task, **metrics})

    def _write_history(self) -> None:
        notes = {"world_size": self.session.world_size, "round": self.session.round, "wall": SYSTEM.wall()}
        with _logged(HISTORY_FILE):
            self.history.write(self.job.directory, notes)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """A file beside the checkpoints never ends the training: a failed write is logged."""
    try:
        yield
    except StorageError as error:
        logs.logger().warning("file.not_written", name=name, error=str(error))
