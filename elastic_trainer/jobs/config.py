"""What a job may say: the validated configuration behind one YAML file, and how it is read, with overrides.

*Fails by* ConfigError: one sentence that names the file, the line or the key, and what to do. Imports no torch.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from elastic_trainer.checkpoint import BestMode
from elastic_trainer.errors import ConfigError, last_line
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
        checked = dict(values)
        for name, field in cls.model_fields.items():
            kinds = {field.annotation, *get_args(field.annotation)}
            if isinstance(values.get(name), bool) and bool not in kinds and kinds & {int, float}:
                checked[name] = str(values[name])  # as text, pydantic refuses it there
        return checked


class Precision(StrEnum):
    """The arithmetic of the forward pass; parameters and optimizer state always stay in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class EvaluationConfig(Section):
    """When the test data is evaluated. The end of the run is always evaluated."""

    every_epochs: int | None = Field(default=1, ge=1, description="evaluate every N epochs, and at the end of the run")
    every_steps: int | None = Field(default=None, ge=1, description="also every N steps")
    batch_size: int = Field(default=256, ge=1, description="samples for each rank and forward pass")


Changeable = (
    Literal["length", "global_batch", "micro_batch", "seed", "shuffle", "scale_from", "lr_rule", "arithmetic", "run"]
    | Annotated[str, Field(pattern=r"^(optimizer|scheduler|scaler)(\.\w+)*$")]
)


class CheckpointConfig(Section):
    """Where and how often the state is saved, and what is kept."""

    directory: str = Field(default="runs", description="the run's directory, or a URL; the same one again resumes")
    every_steps: int | None = Field(default=None, ge=1, description="save every N steps")
    every_s: float | Literal["auto"] | None = Field(
        default=60.0, description="save every N seconds; auto: as often as pays"
    )
    keep_last: int = Field(default=3, ge=1, description="newest checkpoints that stay")
    keep_every: int | None = Field(default=None, ge=1, description="also keep every checkpoint of such a step multiple")
    metric: str | None = Field(default=None, description="keep the checkpoint with the best value of it")
    mode: BestMode = Field(default=BestMode.MAX, description="which values are better")
    export: bool = Field(default=True, description="write the final and the best model as safetensors")
    require_last_save: bool = Field(
        default=False, description="end with exit code 73 where the state at the end cannot be saved"
    )
    allow_changed: tuple[Changeable, ...] = Field(
        default=(),
        description="what may differ from the run that is resumed: see `allow_changed` of the Session",
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
        if "://" in self.directory:
            return Path("runs", self.directory.rstrip("/").rpartition("/")[2])
        return Path(self.directory)


class LoggingConfig(Section):
    """What a running job shows."""

    every_s: float = Field(default=2.0, gt=0.0, description="least time between two lines of progress")
    loss_every: int = Field(
        default=10, ge=1, description="steps between two looks at the global loss, which is a collective"
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        default="auto", description="auto: a bar on a terminal, else lines"
    )
    tensorboard: bool = Field(default=False, description="write event files; needs the extra `tensorboard`")
    loggers: tuple[str, ...] = Field(default=(), description="also log to `wandb`, `mlflow` or one of your own")

    @property
    def names(self) -> tuple[str, ...]:
        """All loggers."""
        return ("tensorboard",) * self.tensorboard + self.loggers


class SgdConfig(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = Field(description="stochastic gradient descent")
    lr: float = Field(default=0.1, gt=0.0, description="learning rate")
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0, description="below 1")
    weight_decay: float = Field(default=0.0, ge=0.0, description="of all parameters, unless the task makes groups")
    nesterov: bool = Field(default=False, description="needs a momentum")

    @model_validator(mode="after")
    def _momentum(self) -> SgdConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class AdamWConfig(Section):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = Field(default="adamw", description="Adam with decoupled weight decay")
    lr: float = Field(default=1e-3, gt=0.0, description="learning rate")
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = Field(
        default=(0.9, 0.999), description="decay of the two moments"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="added to the denominator")
    weight_decay: float = Field(default=0.01, ge=0.0, description="of all parameters, unless the task makes groups")


class ConstantConfig(Section):
    """The learning rate stays as it is, after an optional linear warm-up."""

    name: Literal["none"] = Field(default="none", description="the rate stays as it is")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises linearly")


class StepConfig(Section):
    """The learning rate is multiplied by ``gamma`` every ``every_epochs`` epochs."""

    name: Literal["step"] = Field(description="the rate falls at equal distances")
    every_epochs: float = Field(gt=0.0, description="the distance")
    gamma: float = Field(default=0.1, gt=0.0, le=1.0, description="what the rate is multiplied by")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises linearly")


class MultiStepConfig(Section):
    """The learning rate is multiplied by ``gamma`` at each of the ``milestones``, which are epochs."""

    name: Literal["multistep"] = Field(description="the rate falls at given epochs")
    milestones: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(min_length=1, description="the epochs, rising")
    gamma: float = Field(default=0.1, gt=0.0, le=1.0, description="what the rate is multiplied by at each")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises linearly")

    @model_validator(mode="after")
    def _rising(self) -> MultiStepConfig:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError("'milestones' must rise")
        return self


class CosineConfig(Section):
    """The learning rate falls along half a cosine, to ``floor`` times its beginning at the end of the run."""

    name: Literal["cosine"] = Field(description="the rate falls along half a cosine until the end of the run")
    floor: float = Field(default=0.0, ge=0.0, le=1.0, description="the last rate, as a part of the first")
    warmup_steps: int = Field(default=0, ge=0, description="steps in which the rate rises linearly")


OptimizerConfig = Annotated[SgdConfig | AdamWConfig, Field(discriminator="name")]
SchedulerConfig = Annotated[ConstantConfig | StepConfig | MultiStepConfig | CosineConfig, Field(discriminator="name")]


class JobConfig(Section):
    """One job. The task checks ``data``, ``model`` and ``options`` (see ``Task``)."""

    task: str = Field(min_length=1, description="a ready-made task, or `module:Class`")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of parameters, order and augmentation")
    device: str = Field(default="auto", description="`auto`, `cpu`, `cuda`, `cuda:N`, `mps`")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="gloo: also where several processes share a CUDA device"
    )
    epochs: int | None = Field(
        default=None, ge=1, description="passes over the training data; this or `max_steps` is needed"
    )
    max_steps: int | None = Field(default=None, ge=1, description="most optimizer steps")
    global_batch: int | None = Field(
        default=None,
        ge=1,
        description=("samples for each step over all ranks, whatever their number; needed unless the task derives it"),
    )
    micro_batch: int | None = Field(
        default=None, ge=1, description="most samples in one forward pass; gradients of the others are accumulated"
    )
    workers: int = Field(default=0, ge=0, description="processes of each rank that fetch training samples ahead")
    prefetch: int = Field(default=2, ge=1, description="micro-batches that each of them fetches ahead")
    pin_memory: bool | None = Field(default=None, description="copy through pinned memory; null: when on CUDA")
    bad_samples: Literal["raise", "skip"] = Field(default="raise", description="what a sample that raises does")
    max_bad_fraction: float = Field(default=0.01, ge=0.0, le=1.0, description="of an epoch that may be skipped")
    precision: Precision = Field(default=Precision.FP32, description="of the forward pass; fp16 needs CUDA")
    reduction: Literal["ddp", "tree", "local_sgd", "diloco"] = Field(
        default="ddp",
        description=(
            "tree: the same bits at any number of ranks; needs `micro_batch`. local_sgd and diloco: for slow links"
        ),
    )
    sync_every: int | None = Field(
        default=None,
        ge=1,
        description=(
            "with local_sgd and diloco: how many steps ranks train apart; `max_steps`, "
            "`evaluation.every_steps` and `checkpoint.every_steps` are multiples of it"
        ),
    )
    outer_lr: float | None = Field(
        default=None, gt=0.0, description="with diloco: learning rate of the outer SGD; null: 0.7"
    )
    outer_momentum: float | None = Field(
        default=None,
        ge=0.0,
        lt=1.0,
        description="with diloco: its Nesterov momentum; null: 0.9. Shorter runs want less",
    )
    average: float | None = Field(
        default=None, gt=0.0, lt=1.0, description="decay of a moving average of the parameters, which is then evaluated"
    )
    clip_norm: float | None = Field(default=None, gt=0.0, description="largest norm of the gradient")
    sync_batchnorm: bool = Field(default=False, description="BatchNorm over the samples of all ranks")
    compile: bool = Field(default=False, description="`torch.compile`; the first steps take longer")
    nonfinite: Literal["raise", "warn"] = Field(default="raise", description="what a loss that is not a number does")
    compare_every_steps: int | None = Field(
        default=100, ge=1, description="steps between two comparisons of all ranks' parameters"
    )
    on_difference: Literal["stop", "heal"] = Field(
        default="stop", description="what ranks do whose parameters differ; heal: go on with those of most ranks"
    )
    audit_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between two of which each rank's pass is repeated on another node (CheckOptions)",
    )
    on_mismatch: Literal["report", "repeat"] = Field(
        default="report", description="after a wrong pass; repeat: in place, make the step again"
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    scheduler: SchedulerConfig = ConstantConfig()
    data: dict[str, Any] = Field(default_factory=dict, description="the task's section `Data`")
    model: dict[str, Any] = Field(default_factory=dict, description="the task's section `Model`")
    options: dict[str, Any] = Field(default_factory=dict, description="the task's section `Options`")

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


READY_MADE = "elastic_trainer.jobs"
"""The package of ready-made tasks. Named, not imported: it lies above this one and is loaded like a plug-in."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is an error instead of silently winning, and a date is a text."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
        if isinstance(key, yaml.ScalarNode):
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; a ConfigError with the line number if it is not one."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {error.problem or 'not valid YAML'}", hint="correct the YAML") from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {reason}", hint="correct the YAML") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply", hint="correct the YAML") from error
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:  # of PyYAML's constructors
        raise ConfigError(f"{where}: a value does not fit its type: {last_line(error)}", hint="correct it") from error


def read_job_file(source: str) -> tuple[str, dict[str, Any]]:
    """The name (for messages) and the content of ``source``: a YAML file, or the name of a ready-made task."""
    if source.endswith((".yaml", ".yml")) or "/" in source:
        where, text = source, _read(Path(source))
    else:
        shipped, where = resources.files(READY_MADE), f"{source}.yaml"
        names = sorted(item.name.removesuffix(".yaml") for item in shipped.iterdir() if item.name.endswith(".yaml"))
        if source not in names:
            raise ConfigError(
                f"there is no ready-made task {source!r} and it is not a .yaml file",
                hint=did_you_mean(source, names) or f"ready-made tasks: {', '.join(names)}",
            )
        text = (shipped / where).read_text(encoding="utf-8")
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        found = "empty" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{where}: a mapping of keys to values is expected, but it is {found}", hint="see --help")
    return where, value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file", hint="check the path of the job file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8", hint="give a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="give a readable YAML file") from error


def with_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``values`` with each ``key.sub=value`` set; values are read as YAML (``0.1``, ``null``, ``[1, 2]``)."""
    result = dict(values)
    for text in overrides:
        name, separator, raw = text.partition("=")
        path = name.split(".")
        if not separator or not all(part.isidentifier() for part in path):
            raise ConfigError(f"override {text!r} is not key=value", hint="write for example optimizer.lr=0.01")
        value, target = parse_yaml(raw, f"override {text!r}"), result
        for depth, part in enumerate(path[:-1], 1):
            inner, name = target.get(part), ".".join(path[:depth])
            if inner is not None and not isinstance(inner, dict):
                what = f"override {text!r}: '{name}' is {inner!r}, which has no parts"
                raise ConfigError(what, hint=f"set {name}=...")
            target[part] = target = dict(inner or {})  # a copy: an alias in the YAML may share it
        target[path[-1]] = value
    return result


def load_job(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of the job file or ready-made task ``source`` with ``overrides`` applied."""
    where, values = read_job_file(source)
    names = [text.partition("=")[0] for text in overrides]
    return checked(JobConfig, with_overrides(values, overrides), where, overridden=names)


def checked(
    kind: type[ModelT], values: Mapping[str, Any], where: str, *, prefix: str = "", overridden: Sequence[str] = ()
) -> ModelT:
    """``kind`` built from ``values``, or a ConfigError about the first wrong one.

    ``prefix`` is put before the names of keys (``data.``); a key in ``overridden`` came from the command line.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        refused = error
    # A misspelt key is reported before the key that is missing because of it.
    problems = sorted(refused.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = _written_path(first["loc"], values, missing=first["type"] == "missing")
    name = prefix + ".".join(path)
    origin = "command line" if any(name == key or name.startswith(f"{key}.") for key in overridden) else where
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            what = f"unknown key '{name}'"
            hint = did_you_mean(path[-1], _fields_at(kind, first["loc"][:-1])) or "remove it"
        case "missing" | "union_tag_not_found" as lack:
            name += ".name" if lack == "union_tag_not_found" else ""
            what, hint = f"'{name}' is missing", f"set '{name}'"
        case "union_tag_invalid":
            tag, known = first["ctx"]["tag"], first["ctx"]["expected_tags"].replace("'", "").split(", ")
            what = f"'{name}.name' is {tag!r}, which is not known"
            hint = did_you_mean(tag, known) or f"choose from {', '.join(known)}"
        case _ if not path:
            what, hint = message, "correct this"
        case _:
            what = f"'{name}' is {reprlib.repr(first['input'])}: {message[:1].lower() + message[1:]}"
            hint = "correct this value"
    more = f"; {len(problems) - 1} more problem(s) follow" if len(problems) > 1 else ""
    raise ConfigError(f"{origin}: {what}", hint=hint + more) from refused


def _written_path(loc: Sequence[int | str], values: Any, *, missing: bool) -> list[str]:
    """The keys of ``loc`` as the user wrote them: pydantic also names the member of a union that it tried."""
    path: list[str] = []
    for position, part in enumerate(loc):
        here = isinstance(values, Mapping) and part in values
        here = here or (isinstance(values, list | tuple) and isinstance(part, int) and part < len(values))
        if here:
            values = values[part]
        if here or (missing and position == len(loc) - 1):
            path.append(str(part))
    return path


def _fields_at(kind: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    candidates = [kind]
    for part in loc:
        tagged = [model for model in candidates if "name" in model.model_fields and part in _kinds(model, "name")]
        inner = [each for model in candidates for each in _kinds(model, str(part)) if isinstance(each, type)]
        candidates = tagged or [each for each in inner if issubclass(each, BaseModel)]
    return sorted({name for model in candidates for name in model.model_fields})


def _kinds(model: type[BaseModel], name: str) -> tuple[Any, ...]:
    """What the field ``name`` may be: its type, the members of a union, or the values of a Literal."""
    field = model.model_fields.get(name)
    return (field.annotation, *get_args(field.annotation)) if field is not None else ()


def did_you_mean(word: object, known: Iterable[str]) -> str | None:
    """A hint with the nearest of the ``known`` words, if one is near."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def as_yaml(config: JobConfig) -> str:
    """``config`` as YAML that :func:`load_job` reads back to an equal one."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
