"""What a job may say: the frozen, validated configuration behind one YAML file."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from elastic_trainer.checkpoint.retention import BestMode
from elastic_trainer.checkpoint.storage import is_url
from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import Frozen

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


class Section(Frozen):
    """Base of all parts of a job's configuration; a task's own options derive from it too.

    Immutable, unknown keys are errors, numbers are finite, and a truth value is never a number
    (YAML reads ``epochs: yes`` as true, which pydantic would otherwise accept as 1).
    """

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_as_number(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: str(value) if cls._is_misplaced(name, value) else value for name, value in values.items()}

    @classmethod
    def _is_misplaced(cls, name: object, value: object) -> bool:
        """Whether ``value`` is a truth value where a number belongs; as text, pydantic refuses it there."""
        field = cls.model_fields.get(str(name))
        if field is None or not isinstance(value, bool):
            return False
        kinds = {field.annotation, *get_args(field.annotation)}
        return bool not in kinds and bool(kinds & {int, float})


class Precision(StrEnum):
    """The arithmetic of the forward pass; parameters and optimizer state always stay in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class EvaluationConfig(Section):
    """When the test data is evaluated. The end of the run is always evaluated."""

    every_epochs: int | None = Field(default=1, ge=1)
    every_steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=256, ge=1, description="samples per rank and forward pass")


Changeable = (
    Literal["length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "arithmetic", "run"]
    | Annotated[str, Field(pattern=r"^(optimizer|scheduler|scaler)(\.\w+)*$")]
)


class CheckpointConfig(Section):
    """Where and how often the state is saved, and what is kept."""

    directory: str = Field(default="runs", description="a path, or an s3://, gs:// or az:// URL")
    every_steps: int | None = Field(default=None, ge=1)
    every_s: float | Literal["auto"] | None = Field(
        default=60.0, description="auto: by the cost of a save and the failures seen"
    )
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, ge=1, description="also keep every checkpoint of such a step multiple")
    metric: str | None = Field(default=None, description="keep the checkpoint with the best value of it")
    mode: BestMode = BestMode.MAX
    export: bool = Field(default=True, description="write the final and the best model as safetensors beside it")
    require_last_save: bool = Field(default=False, description="fail (73) where the state at the end cannot be saved")
    allow_changed: tuple[Changeable, ...] = Field(
        default=(),
        description="what may differ from the run that is resumed: samples may then repeat or miss; optimizer.lr, ...",
    )

    @field_validator("every_s")
    @classmethod
    def _positive(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and value <= 0.0:
            raise ValueError("give a number of seconds above 0, auto, or null")
        return value

    @property
    def files(self) -> Path:
        """Where curves, logs and exports go: beside the checkpoints, or for a URL to a directory named after it."""
        if is_url(self.directory):
            return Path("runs", self.directory.rstrip("/").rpartition("/")[2])
        return Path(self.directory)


class LoggingConfig(Section):
    """What a running job shows."""

    every_s: float = Field(default=2.0, gt=0.0, description="least time between two lines of progress")
    loss_every: int = Field(default=10, ge=1, description="steps between two looks at the global loss (a collective)")
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    tensorboard: bool = Field(default=False, description="scalars and exhibits in checkpoint.directory/tensorboard")
    loggers: tuple[str, ...] = Field(default=(), description="also to these: wandb, mlflow, or registered ones")

    @property
    def names(self) -> tuple[str, ...]:
        """All loggers."""
        return ("tensorboard",) * self.tensorboard + self.loggers


class SgdConfig(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"]
    lr: float = Field(default=0.1, gt=0.0)
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    nesterov: bool = False

    @model_validator(mode="after")
    def _momentum(self) -> SgdConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class AdamWConfig(Section):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0.0)
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)


class ConstantConfig(Section):
    """The learning rate stays as it is, after an optional linear warm-up."""

    name: Literal["none"] = "none"
    warmup_steps: int = Field(default=0, ge=0)


class StepConfig(Section):
    """The learning rate is multiplied by ``gamma`` every ``every_epochs`` epochs."""

    name: Literal["step"]
    every_epochs: float = Field(gt=0.0)
    gamma: float = Field(default=0.1, gt=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)


class MultiStepConfig(Section):
    """The learning rate is multiplied by ``gamma`` at each of the ``milestones``, which are epochs."""

    name: Literal["multistep"]
    milestones: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(min_length=1)
    gamma: float = Field(default=0.1, gt=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _rising(self) -> MultiStepConfig:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("'milestones' must rise")
        return self


class CosineConfig(Section):
    """The learning rate falls along half a cosine, to ``floor`` times its beginning at the end of the run."""

    name: Literal["cosine"]
    floor: float = Field(default=0.0, ge=0.0, le=1.0)
    warmup_steps: int = Field(default=0, ge=0)


OptimizerConfig = Annotated[SgdConfig | AdamWConfig, Field(discriminator="name")]
SchedulerConfig = Annotated[ConstantConfig | StepConfig | MultiStepConfig | CosineConfig, Field(discriminator="name")]


class JobConfig(Section):
    """One job. The task checks ``data``, ``model`` and ``options`` (see ``Task``)."""

    task: str = Field(min_length=1, description="a ready-made task, or module:Class of your own")
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="gloo: also where several processes share a CUDA device"
    )
    epochs: int | None = Field(default=None, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    global_batch: int | None = Field(
        default=None,
        ge=1,
        description="samples per optimizer step, over all ranks, whatever their number; a task may derive it",
    )
    micro_batch: int | None = Field(default=None, ge=1, description="most samples in one forward pass")
    workers: int = Field(default=0, ge=0, description="processes per rank that fetch training samples ahead of use")
    prefetch: int = Field(default=2, ge=1, description="micro-batches that each of them fetches ahead")
    pin_memory: bool | None = Field(default=None, description="copy through pinned memory; null: when on CUDA")
    bad_samples: Literal["raise", "skip"] = Field(default="raise", description="what a sample that raises does")
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0, description="of an epoch that may be skipped")
    precision: Precision = Precision.FP32
    reduction: Literal["ddp", "tree", "local_sgd", "diloco"] = Field(
        default="ddp",
        description="tree: the same bits at any number of ranks (needs micro_batch); local_sgd, diloco: for slow links",
    )
    sync_every: int | None = Field(
        default=None, ge=1, description="with local_sgd and diloco: how many steps ranks train apart"
    )
    outer_lr: float | None = Field(default=None, gt=0.0, description="with diloco: of the outer SGD; null: 0.7")
    outer_momentum: float | None = Field(
        default=None, ge=0.0, lt=1.0, description="with diloco: of the outer SGD (Nesterov); null: 0.9"
    )
    average: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="decay of a moving average of the parameters, which is evaluated"
    )
    clip_norm: float | None = Field(default=None, gt=0.0)
    sync_batchnorm: bool = False
    compile: bool = Field(default=False, description="compile the model (torch.compile); the first steps take longer")
    nonfinite: Literal["raise", "warn"] = Field(default="raise", description="what a loss that is not a number does")
    compare_every_steps: int | None = Field(
        default=100, ge=1, description="steps between two comparisons of all ranks' parameters"
    )
    on_difference: Literal["stop", "heal"] = Field(
        default="stop", description="what ranks do whose parameters differ; heal: go on with those of most ranks"
    )
    audit_every: int | None = Field(
        default=None, ge=1, description="steps between two of which each rank's pass is repeated on another node"
    )
    on_mismatch: Literal["report", "repeat"] = Field(
        default="report", description="after a wrong pass; repeat: in place, make the step again"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    scheduler: SchedulerConfig = ConstantConfig()
    data: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError("must be auto, cpu, cuda, cuda:N or mps")
        return value

    @model_validator(mode="after")
    def _bounded(self) -> JobConfig:
        if not self.options and (lack := self.lack()) is not None:  # a task derives from its options alone
            raise ValueError(lack)
        small, large = self.micro_batch, self.global_batch
        if small is not None and large is not None and small > large:
            raise ValueError(f"'micro_batch' {small} is larger than 'global_batch' {large}")
        if self.reduction == "tree" and (self.micro_batch is None or self.sync_batchnorm):
            wrong = "needs 'micro_batch'" if self.micro_batch is None else "does not go with 'sync_batchnorm'"
            raise ValueError(f"'reduction' tree {wrong}")
        apart = self.reduction in ("local_sgd", "diloco")
        if apart != (self.sync_every is not None):
            raise ValueError(f"'reduction' {self.reduction} {'needs' if apart else 'goes without'} 'sync_every'")
        for name, steps in (("max_steps", self.max_steps), ("evaluation.every_steps", self.evaluation.every_steps)):
            if steps is not None and steps % (self.sync_every or 1):
                raise ValueError(f"'{name}' {steps} is not a multiple of 'sync_every' {self.sync_every}")
        return self

    def lack(self) -> str | None:
        """What is missing that only the task's own options may stand in for (see ``Task.implied_config``)."""
        if self.epochs is None and self.max_steps is None:
            return "set 'epochs' or 'max_steps', or the job would never end"
        return "'global_batch' is missing" if self.global_batch is None else None

    @property
    def samples_per_step(self) -> int:
        """``global_batch``, where it is known: in the configuration of every task."""
        if self.global_batch is None:
            raise ConfigError("'global_batch' is missing", hint="set 'global_batch'")
        return self.global_batch
