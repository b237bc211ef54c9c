"""What a user writes: a model, data, a loss and metrics, and nothing about ranks, failures or checkpoints.

With it what follows from a task's configuration: the length of its run, its optimizer and learning rate schedule.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from elastic_trainer import MapDataset, SeekableStream
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import (
    READY_MADE,
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    EvaluationConfig,
    JobConfig,
    MultiStepConfig,
    OptimizerConfig,
    SchedulerConfig,
    Section,
    SgdConfig,
    StepConfig,
    checked,
)
from elastic_trainer.model import Cursor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class RunLength:
    """A run in epochs and optimizer steps. Independent of the number of ranks, since the global batch is.

    ``steps`` is what a whole run takes (schedules and progress go by it). It is no limit: a run that was resumed with
    another global batch takes more or fewer, and still sees all its epochs.
    """

    samples: int
    steps_per_epoch: int
    epochs: int
    steps: int
    max_steps: int | None = None

    def is_over(self, cursor: Cursor, step: int) -> bool:
        """Whether a run that committed ``step`` steps and stands at ``cursor`` has nothing left to do."""
        limited = self.max_steps is not None and step >= self.max_steps
        return limited or epochs_done(cursor, self.samples) >= self.epochs


def run_length(config: JobConfig, samples: int) -> RunLength:
    """The length of the job ``config`` on ``samples`` training samples; the last batch of an epoch may be smaller."""
    per_epoch = math.ceil(samples / config.samples_per_step)
    by_epochs = math.inf if config.epochs is None else config.epochs * per_epoch
    by_steps = math.inf if config.max_steps is None else config.max_steps
    steps = int(min(by_epochs, by_steps))
    return RunLength(samples, per_epoch, math.ceil(steps / per_epoch), steps, config.max_steps)


def epochs_done(cursor: Cursor, samples: int) -> int:
    """Whole epochs behind ``cursor`` on a data set of ``samples`` samples."""
    return cursor.epoch + (cursor.samples >= samples)


def evaluation_due(config: EvaluationConfig, length: RunLength, cursor: Cursor, step: int) -> bool:
    """Whether the state after ``step`` steps, at ``cursor``, is to be evaluated.

    A function of the position alone: a run resumed between a step and its evaluation finds it still due.
    """
    if step == 0:
        return False
    if length.is_over(cursor, step):
        return True
    at_epoch_end = cursor.samples == 0 or cursor.samples >= length.samples
    epochs, steps = config.every_epochs, config.every_steps
    by_epoch = at_epoch_end and epochs is not None and epochs_done(cursor, length.samples) % epochs == 0
    return by_epoch or (steps is not None and step % steps == 0)


def build_optimizer(config: OptimizerConfig, parameters: ParamsT) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names, over ``parameters`` or groups of them, as torch's own take them."""
    arguments = config.model_dump(exclude={"name"})
    match config:
        case SgdConfig():
            return torch.optim.SGD(parameters, **arguments)
        case AdamWConfig():
            return torch.optim.AdamW(parameters, **arguments)


def decay_groups(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups: matrices (kernels, embeddings), which decay as the optimizer says; biases and gains, which do not.

    He et al., 2018, "Bag of Tricks", https://arxiv.org/abs/1812.01187, section 3.1; GPT-2 is trained so too.
    """
    every = list(parameters)
    matrices = [each for each in every if each.dim() > 1]
    return [{"params": matrices}, {"params": [each for each in every if each.dim() <= 1], "weight_decay": 0.0}]


def build_scheduler(
    config: SchedulerConfig, optimizer: torch.optim.Optimizer, length: RunLength
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule that ``config`` names, advanced once per optimizer step; None where the rate never changes."""
    if isinstance(config, ConstantConfig) and not config.warmup_steps:
        return None
    return Schedule(config, optimizer, length)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """The schedule that ``config`` names. What decides its course is in its state, so a resumed job compares it."""

    def __init__(self, config: SchedulerConfig, optimizer: torch.optim.Optimizer, length: RunLength) -> None:
        self.settings: dict[str, Any] = config.model_dump(mode="json")
        if isinstance(config, CosineConfig):
            self.settings["steps"] = length.steps
        elif not isinstance(config, ConstantConfig):
            self.settings["steps_per_epoch"] = length.steps_per_epoch
        super().__init__(optimizer, lambda step: rate_factor(config, step, length))


def lengths(scheduler: object) -> list[str]:
    """The settings of ``scheduler`` that follow from the length of the run, which a resumed job may change."""
    settings = scheduler.settings if isinstance(scheduler, Schedule) else ()
    return [f"scheduler.{name}" for name in ("steps", "steps_per_epoch") if name in settings]


def rate_factor(config: SchedulerConfig, step: int, length: RunLength) -> float:
    """What the learning rate of optimizer step ``step`` (from 0) is multiplied by."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    match config:
        case ConstantConfig():
            return 1.0
        case StepConfig():
            return float(config.gamma ** math.floor(step / (config.every_epochs * length.steps_per_epoch)))
        case MultiStepConfig():
            passed = sum(step >= milestone * length.steps_per_epoch for milestone in config.milestones)
            return float(config.gamma**passed)
        case CosineConfig():
            span = max(1, length.steps - config.warmup_steps)
            progress = min(1.0, (step - config.warmup_steps) / span)
            return config.floor + (1.0 - config.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Datasets:
    """What to train on (map-style, or a stream in its own order) and what to evaluate on."""

    train: MapDataset | SeekableStream
    test: MapDataset


@dataclass(frozen=True, slots=True)
class Exhibits:
    """What to show, by name: images of (3, height, width) bytes on the CPU, and texts."""

    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class Task(ABC):
    """Derive from this, name the class in the job file (``task: my_module:MyTask``), and run the job.

    A complete task::

        class Digits(Task):
            class Model(Section):            # what the job file may say under 'model:'
                width: int = 16

            def model(self):
                return MyNet(self.model_options.width)

            def datasets(self):
                return Datasets(train=my_train_set, test=my_test_set)

            def loss(self, model, batch):    # a mean over the batch
                return cross_entropy(model(batch.x), batch.y)

            def metrics(self, model, batch): # sums and counts: exact however the data is divided
                hits = (model(batch.x).argmax(1) == batch.y).sum()
                return {"accuracy": (hits, len(batch.y))}

    The methods are called on every rank, in this order: ``datasets``, ``identity``, ``model``, ``optimizer``,
    ``scheduler`` once, then ``loss`` and ``metrics`` for each (micro-)batch. Whatever is random must come from torch's,
    numpy's or Python's global generators (seeded and resumed with the job) or from the identity of the samples.
    """

    Data: ClassVar[type[Section]] = Section
    """What the job file may say under ``data:``; an instance of it becomes ``self.data_options``."""
    Model: ClassVar[type[Section]] = Section
    """What the job file may say under ``model:``; an instance of it becomes ``self.model_options``."""
    Options: ClassVar[type[Section]] = Section
    """What the job file may say under ``options:``; an instance of it becomes ``self.options``."""

    def __init__(self, config: JobConfig) -> None:
        kinds = {"data": self.Data, "model": self.Model, "options": self.Options}
        where = f"task {config.task}"
        own = {name: checked(kind, getattr(config, name), where, prefix=f"{name}.") for name, kind in kinds.items()}
        self.data_options: Any = own["data"]
        self.model_options: Any = own["model"]
        self.options: Any = own["options"]
        self.config = config.model_copy(update={name: each.model_dump(mode="json") for name, each in own.items()})
        self.config = _completed(self.config, self.implied_config())
        """The configuration with this task's own sections, and what follows from them, filled in."""

    @abstractmethod
    def datasets(self) -> Datasets:
        """Training and test data. Raises DataError, with one sentence, if there is none."""

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """A new model on the CPU; its parameters are drawn from torch's generator, which is seeded before."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The *mean* loss over ``batch``, a scalar; ``model`` is in training mode."""

    @abstractmethod
    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        """For each metric its sum over ``batch`` and what to divide the sum of all batches by; no gradients."""

    def implied_config(self) -> Mapping[str, Any]:
        """Keys of the job file that follow from this task's own sections, as ``global_batch`` from a number of tokens.

        They need not be set in the job file, and must not be set otherwise there.
        """
        return {}

    def implied_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """More metrics, which follow from those over the whole data set, as the perplexity from the mean loss."""
        del metrics
        return {}

    def identity(self) -> Mapping[str, Any]:
        """Facts about the data that must stay as they are when the run is resumed, by name: JSON values.

        For example the names of classes in their order, or a vocabulary. Called after ``datasets``. They are kept with
        the checkpoints; a job that resumes with others ends with one sentence that names what was added or removed.
        """
        return {}

    def exhibits(self, model: torch.nn.Module, batch: Any) -> Exhibits:
        """What to show of the first eight test samples after an evaluation (in TensorBoard), none by default.

        Called on rank 0 alone, with the model in evaluation mode, outside DDP and without gradients: no collectives.
        """
        del model, batch
        return Exhibits()

    def mesh(self) -> Mapping[str, int]:
        """The dimensions of the mesh over which the model is sharded within a node, by name, at most one of them -1
        (what the others leave of the node's processes). Empty: the model is not sharded."""
        return {}

    def parallelize(self, model: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Shard ``model``, which is on the meta device, over ``mesh``; see :meth:`mesh`."""
        raise NotImplementedError

    def init_weights(self, model: torch.nn.Module) -> None:
        """Then: give it its first values; `whole`, as `with whole(parameter) as values`, has them depend on the seed
        alone."""
        raise NotImplementedError

    def miniature(self) -> torch.nn.Module:
        """Where :meth:`model` is sharded: a small one of its kind on the CPU, whose metrics have the same names."""
        raise NotImplementedError

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer; by default what the section ``optimizer:`` says, over all parameters.

        Made with the same settings at any number of ranks: a job that resumes with others is refused.
        """
        return build_optimizer(self.config.optimizer, model.parameters())

    def scheduler(
        self, optimizer: torch.optim.Optimizer, length: RunLength
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The learning rate schedule, advanced once per optimizer step; by default what ``scheduler:`` says."""
        return build_scheduler(self.config.scheduler, optimizer, length)


def _completed(config: JobConfig, implied: Mapping[str, Any]) -> JobConfig:
    where = f"task {config.task}"
    for key, value in implied.items():
        given = getattr(config, key)
        if given is not None and given != value:
            raise ConfigError(
                f"{where}: '{key}' is {given}, but its options make it {value}", hint="leave one of them out"
            )
    if implied:
        config = checked(JobConfig, {**config.model_dump(), **implied}, where)
    if (lack := config.lack()) is not None:
        raise ConfigError(f"{where}: {lack}", hint="neither the job file nor the task's options say it")
    return config


def find_task(name: str) -> type[Task]:
    """The task class called ``name``: a ready-made one, or ``module:Class`` of the user's own."""
    module_name, separator, class_name = name.partition(":")
    if not separator:
        return _class(*importlib.import_module(READY_MADE).home(name))
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise ConfigError(f"task {name!r} is not module:Class", hint="write for example my_package.my_module:MyTask")
    return _class(module_name, class_name)


def _class(module_name: str, class_name: str) -> type[Task]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(
            f"task {module_name}:{class_name}: there is no module '{error.name}'",
            hint="start in the directory of the module, or add that to PYTHONPATH",
        ) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "has no such class" if found is None else "is not a subclass of elastic_trainer.Task"
        raise ConfigError(f"task {module_name}:{class_name}: {what}", hint="check the name of the class")
    return found
