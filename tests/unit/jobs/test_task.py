"""Job files, tasks, and what follows from them: lengths, evaluations, learning rates; and what is said of mistakes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import yaml
from torch import nn

from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.jobs import names
from elastic_trainer.jobs.config import (
    AdamWConfig,
    ConstantConfig,
    CosineConfig,
    EvaluationConfig,
    JobConfig,
    MultiStepConfig,
    Precision,
    SchedulerConfig,
    Section,
    SgdConfig,
    StepConfig,
    as_yaml,
    load_job,
    parse_yaml,
    with_overrides,
)
from elastic_trainer.jobs.main import main
from elastic_trainer.jobs.task import (
    Datasets,
    RunLength,
    Task,
    build_scheduler,
    evaluation_due,
    find_task,
    lengths,
    rate_factor,
    run_length,
)
from elastic_trainer.jobs.trainer import measurable
from elastic_trainer.model import Cursor
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import data, loss_of

JOB = """\
task: mnist
epochs: 2
global_batch: 32
optimizer: {name: sgd, lr: 0.1}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def _refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(str(path), overrides)
    assert caught.value.exit_code == EXIT_CONFIG
    text = str(caught.value)
    assert "\n" not in text, "an error is one line"
    return text


def test_a_file_is_read_with_defaults_filled_in_and_overrides(job: Path) -> None:
    """key.sub=value sets one value and keeps its neighbours, typed as YAML types it; 1e-3, which YAML 1.1 calls text,
    is a number. A date is a text, also one that no calendar has: a directory is often called after one."""
    config = load_job(str(job))
    assert (config.task, config.epochs, config.global_batch, config.seed) == ("mnist", 2, 32, 0)
    assert config.optimizer == SgdConfig(name="sgd", lr=0.1)
    assert (config.precision, config.checkpoint.keep_last) == (Precision.FP32, 3)
    config = load_job(str(job), ["optimizer.lr=1e-3", "precision=bf16", "checkpoint.every_s=null", "model.width=8"])
    assert config.optimizer == SgdConfig(name="sgd", lr=0.001)
    assert (config.precision, config.checkpoint.every_s, config.model) == (Precision.BF16, None, {"width": 8})
    other = ["optimizer.name=adamw", "optimizer.betas=[0.8, 0.9]", "scheduler.name=step", "scheduler.every_epochs=1"]
    config = load_job(str(job), other)
    assert config.optimizer == AdamWConfig(lr=0.1, betas=(0.8, 0.9))
    assert config.scheduler == StepConfig(name="step", every_epochs=1)
    for name in ("2024-02-28", "2024-02-30"):
        assert load_job(str(job), [f"checkpoint.directory={name}"]).checkpoint.directory == name


def test_an_override_leaves_an_alias_as_it_was() -> None:
    """And YAML's merge key may be overridden by a key of the mapping itself: that is none given twice."""
    values = parse_yaml("a: &a {lr: 1}\nb: *a\n", "f")
    assert with_overrides(values, ["a.lr=2"]) == {"a": {"lr": 2}, "b": {"lr": 1}}
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, x: 2}\n", "f") == {"a": {"x": 1}, "b": {"x": 2}}


def test_the_effective_configuration_reads_back_equal(job: Path, tmp_path: Path) -> None:
    """What is written beside the checkpoints starts the same job again."""
    for overrides in ([], ["scheduler.name=cosine", "clip_norm=1.0", "max_steps=7"]):
        config = load_job(str(job), overrides)
        copy = tmp_path / "copy.yaml"
        copy.write_text(as_yaml(config))
        assert load_job(str(copy)) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("epochz=3", ["command line", "unknown key 'epochz'", "did you mean 'epochs'?"]),
        ("optimizer.momentun=0.9", ["unknown key 'optimizer.momentun'", "did you mean 'momentum'?"]),
        ("checkpoint.keep=2", ["unknown key 'checkpoint.keep'"]),
        ("evaluation.every_step=2", ["unknown key 'evaluation.every_step'", "did you mean 'every_steps'?"]),
        ("epochs=three", ["'epochs' is 'three'", "valid integer"]),
        ("epochs=yes", ["'epochs' is 'True'", "valid integer"]),
        ("epochs=0", ["'epochs' is 0", "greater than or equal to 1"]),
        ("epochs=2.5", ["'epochs' is 2.5"]),
        ("epochs=null", ["'epochs' or 'max_steps'"]),
        ("global_batch=null", ["'global_batch' is missing"]),
        ("reduction=diloco", ["'reduction' diloco needs 'sync_every'"]),
        ("sync_every=30", ["'reduction' ddp goes without 'sync_every'"]),
        ("optimizer.lr=-1", ["'optimizer.lr' is -1", "greater than 0"]),
        ("optimizer.lr=.nan", ["'optimizer.lr' is nan", "finite"]),
        ("optimizer.name=sdg", ["'optimizer.name' is 'sdg'", "did you mean 'sgd'?"]),
        ("optimizer.nesterov=true", ["nesterov needs a momentum"]),
        ("scheduler.gamma=0.5", ["'scheduler.name' is missing"]),
        ("scheduler.name=step", ["'scheduler.every_epochs' is missing"]),
        ("scheduler={name: multistep, milestones: []}", ["'scheduler.milestones' is []"]),
        ("scheduler={name: multistep, milestones: [0]}", ["'scheduler.milestones.0' is 0"]),
        ("scheduler={name: multistep, milestones: [2, 1]}", ["'milestones' must rise"]),
        ("scheduler={name: multistep, milestones: [1, 1]}", ["'milestones' must rise"]),
        ("precision=int8", ["'precision' is 'int8'"]),
        ("device=tpu", ["'device' is 'tpu'", "auto, cpu, cuda"]),
        ("micro_batch=64", ["'micro_batch' 64 is larger than 'global_batch' 32"]),
        ("checkpoint.mode=best", ["'checkpoint.mode' is 'best'"]),
        ("optimizer=[1, 2]", ["'optimizer' is [1, 2]"]),
        ("optimizer", ["'optimizer' is not key=value"]),
        ("=3", ["'=3' is not key=value"]),
        ("optimizer..lr=3", ["is not key=value"]),
        ("--epochs=3", ["is not key=value"]),
        ("epochs.x=3", ["'epochs' is 2, which has no parts"]),
        ("epochs=2024-02-30", ["'epochs' is '2024-02-30'"]),
        ("epochs=!!timestamp x", ["override 'epochs=!!timestamp x'", "does not fit its type"]),
        ("epochs=!!int ''", ["override", "does not fit its type"]),
        ("epochs=!!float x", ["override", "does not fit its type"]),
        ("epochs=!!bool x", ["override", "does not fit its type"]),
        ("epochs=[1", ["override 'epochs=[1'", "line 1"]),
    ],
)
def test_a_wrong_override_is_one_sentence(job: Path, override: str, parts: list[str]) -> None:
    text = _refused(job, override)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("task: mnist\nepochs: [1\nseed: 2\n", ["job.yaml, line 3"]),
        ("task: mnist\nepochs: 1\ntask: other\n", ["job.yaml, line 3", "'task' is given twice"]),
        ("a: {b: 1,\n  b: 2}\n", ["line 2", "'b' is given twice"]),
        ("task: mnist\n\tepochs: 1\n", ["line 2"]),
        ("", ["it is empty"]),
        ("- 1\n- 2\n", ["it is a list"]),
        ("task: mnist\nepochs: 1\n", ["'global_batch' is missing"]),
        ("task: !!python/object/apply:os.system [true]\n", ["line 1"]),
        ("a: &a {b: *a}\n", ["line 1"]),
        ("1: 2\ntask: mnist\n", ["job.yaml"]),
        (
            "taks: mnist\nepochs: 1\nglobal_batch: 2\n",
            ["job.yaml: unknown key 'taks'", "did you mean 'task'?", "1 more"],
        ),
        ("[" * 3000, ["job.yaml"]),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_place(tmp_path: Path, content: str, parts: list[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(content)
    text = _refused(path)
    for part in parts:
        assert part in text


def test_a_missing_or_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no such file" in _refused(tmp_path / "none.yaml")
    (tmp_path / "dir.yaml").mkdir()
    assert "cannot be read" in _refused(tmp_path / "dir.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00task")
    assert "not a text file" in _refused(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match=r"no ready-made task 'mnst'.*did you mean 'mnist'"):
        load_job("mnst")


def test_the_shipped_job_files_are_plain_yaml() -> None:
    """The ready-made files need no loader of ours; each task has one of its own name."""
    shipped = Path("elastic_trainer/jobs")
    files = sorted((Path(__file__).parents[3] / shipped).glob("*.yaml"))
    assert {path.stem for path in files} >= set(names())
    for path in files:
        assert yaml.safe_load(path.read_text())["task"] in names()


def as_rank(monkeypatch: pytest.MonkeyPatch, directory: Path | None, rank: int) -> None:
    """As torchrun, or another launcher (no directory), starts it."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
        monkeypatch.setenv(name, str(value))
    if directory is not None:
        (directory / str(rank)).mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(directory / str(rank) / "error.json"))


def test_the_first_rank_to_find_a_mistake_prints_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for the first of the node, which torchrun may have ended by then; another mistake is told as well,
    and all are told again when all are started again. Other launchers start each rank by itself: the first tells it."""
    mistakes: tuple[list[str], ...] = ([], ["no-such-task"])
    told = []
    for attempt, rank, mistake in ((0, 2, 0), (0, 0, 0), (0, 1, 1), (1, 1, 0)):
        as_rank(monkeypatch, tmp_path / f"attempt_{attempt}", rank)
        assert main(mistakes[mistake]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: "))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    for rank in (1, 0):
        as_rank(monkeypatch, None, rank)
        assert main([]) == EXIT_CONFIG
        told.append(capsys.readouterr().err.count("error: no job was given"))
    assert told == [1, 0, 1, 1, 0, 1]


class Line(Task):
    class Model(Section):
        """The only choice."""

        bias: bool = True
        width: int = 2

    def datasets(self) -> Datasets:
        points = torch.arange(10.0).unsqueeze(1)
        data = torch.utils.data.TensorDataset(points, 2 * points)
        return Datasets(train=data, test=data)

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1, bias=self.model_options.bias)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, tuple[Any, Any]]:
        return {"error": ((model(batch.x) - batch.y).square().sum(), len(batch.x))}


def _job(**values: object) -> JobConfig:
    return JobConfig.model_validate({"task": "line", "epochs": 1, "global_batch": 2, **values})


def test_the_tasks_own_sections_are_checked_and_filled_in() -> None:
    """Defaults of a section are part of the effective configuration."""
    task = Line(_job(model={"bias": False}))
    assert task.model_options.bias is False
    assert task.config.model == {"bias": False, "width": 2}
    assert task.config.data == {}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model": {"biass": False}}, ["task line: unknown key 'model.biass'", "did you mean 'bias'?"]),
        ({"model": {"width": "wide"}}, ["'model.width' is 'wide'"]),
        ({"model": {"width": True}}, ["'model.width' is 'True'"]),
        ({"data": {"x": 1}}, ["unknown key 'data.x'"]),
        ({"options": {"x": 1}}, ["unknown key 'options.x'"]),
    ],
)
def test_a_mistake_in_a_tasks_section_is_one_sentence(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Line(_job(**values))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mnst", ["no ready-made task 'mnst'", "did you mean 'mnist'?"]),
        ("nowhere_at_all:Task", ["no module 'nowhere_at_all'", "PYTHONPATH"]),
        ("elastic_trainer.nowhere:Task", ["no module 'elastic_trainer.nowhere'"]),
        (f"{__name__}:Nothing", ["has no such class"]),
        (f"{__name__}:Section", ["is not a subclass"]),
        ("a b:c", ["is not module:Class"]),
        ("torch:", ["is not module:Class"]),
    ],
)
def test_a_wrong_task_name_is_one_sentence(name: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_task(name)
    for part in parts:
        assert part in str(caught.value)


def test_tasks_are_found_by_short_name_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails inside the user's module is not blamed on the name, and keeps its traceback."""
    assert find_task("mnist").__module__ == "elastic_trainer.jobs.mnist"
    assert find_task(f"{__name__}:Line") is Line
    (tmp_path / "broken_task_module.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        find_task("broken_task_module:Task")


class Doubling(Line):
    """Its option says how large a batch is."""

    class Options(Section):
        """Half of the batch."""

        half: int = 2

    def implied_config(self) -> Mapping[str, Any]:
        return {"global_batch": 2 * self.options.half}

    def implied_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"root": metrics["error"] ** 0.5}


class Silent(Doubling):
    def implied_config(self) -> Mapping[str, Any]:
        return {}


def test_a_task_may_say_what_the_job_file_leaves_out() -> None:
    """From its own options; the effective configuration reads back equal, and needs no options to be complete. Which is
    meant of two that contradict each other, nobody knows."""
    config = JobConfig.model_validate({"task": "line", "epochs": 1, "options": {"half": 3}})
    task = Doubling(config)
    assert task.config.global_batch == 6
    assert Doubling(task.config).config == task.config
    assert Line(_job()).config.samples_per_step == 2
    assert measurable(task, task.model(), task.datasets().test) == ["error", "root"]  # to choose the best checkpoint by
    with pytest.raises(ConfigError, match=r"task line: 'global_batch' is 5, but its options make it 4"):
        Doubling(_job(global_batch=5))
    with pytest.raises(ConfigError, match=r"task line: 'global_batch' is missing"):
        Silent(config)


LENGTH = RunLength(samples=100, steps_per_epoch=4, epochs=3, steps=12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"epochs": 3}, RunLength(100, 4, 3, 12)),
        ({"max_steps": 5}, RunLength(100, 4, 2, 5, 5)),
        ({"epochs": 1, "max_steps": 50}, RunLength(100, 4, 1, 4, 50)),
        ({"epochs": 9, "max_steps": 4}, RunLength(100, 4, 1, 4, 4)),
    ],
)
def test_the_length_is_the_shorter_of_epochs_and_steps(values: dict[str, int], expected: RunLength) -> None:
    assert run_length(_job(**{"epochs": None, "global_batch": 30, **values}), 100) == expected


@pytest.mark.parametrize(
    ("cursor", "step", "finished"),
    [
        (Cursor(0, 0), 0, False),
        (Cursor(2, 90), 11, False),
        (Cursor(2, 100), 12, True),
        (Cursor(3, 0), 12, True),
        (Cursor(1, 30), 15, False),
        (Cursor(3, 0), 6, True),
    ],
)
def test_a_run_is_finished_by_its_epochs(cursor: Cursor, step: int, finished: bool) -> None:
    """Epochs count by samples, so a run resumed with another batch size sees all its data, in however many steps."""
    assert LENGTH.is_over(cursor, step) is finished
    assert replace(LENGTH, max_steps=7).is_over(cursor, step) is (finished or step >= 7)


def test_evaluation_follows_epochs_or_steps_or_only_the_end() -> None:
    """A checkpoint taken between the last step of an epoch and its evaluation leads to that evaluation."""
    due = {
        (epochs, steps): [s for s in range(13) if evaluation_due(config, LENGTH, _cursor_after(s), s)]
        for epochs, steps in ((None, 3), (2, None), (None, None))
        for config in [EvaluationConfig(every_epochs=epochs, every_steps=steps)]
    }
    assert due == {(None, 3): [3, 6, 9, 12], (2, None): [8, 12], (None, None): [12]}
    config = EvaluationConfig(every_epochs=1)
    assert evaluation_due(config, LENGTH, Cursor(0, 100), 4)
    assert evaluation_due(config, LENGTH, Cursor(1, 0), 4)
    assert not evaluation_due(config, LENGTH, Cursor(0, 90), 3)
    assert not evaluation_due(config, LENGTH, Cursor(0, 0), 0)


def _cursor_after(step: int) -> Cursor:
    epoch, within = divmod(step, LENGTH.steps_per_epoch)
    return Cursor(epoch, min(within * 30, 100))


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (ConstantConfig(warmup_steps=3), [0.25, 0.5, 0.75, *[1.0] * 9]),
        (StepConfig(name="step", every_epochs=1.5, gamma=0.5), [1.0] * 6 + [0.5] * 6),
        (
            MultiStepConfig(name="multistep", milestones=(1, 2.5), gamma=0.5, warmup_steps=1),
            [0.5, 1.0, 1.0, 1.0, *[0.5] * 6, 0.25, 0.25],
        ),
    ],
)
def test_a_rate_warms_up_and_falls_at_its_epochs(config: SchedulerConfig, factors: list[float]) -> None:
    """Counted in steps: four are an epoch."""
    assert [rate_factor(config, step, LENGTH) for step in range(12)] == factors


def test_a_cosine_begins_at_one_and_ends_at_its_floor() -> None:
    config = CosineConfig(name="cosine", floor=0.1, warmup_steps=2)
    factors = [rate_factor(config, step, LENGTH) for step in range(14)]
    assert factors[:3] == [1 / 3, 2 / 3, 1.0]
    assert math.isclose(factors[7], 0.55)
    assert factors[12] == factors[13] == 0.1
    short = RunLength(samples=2, steps_per_epoch=2, epochs=1, steps=2)  # over before it is warm
    assert [rate_factor(config, step, short) for step in (2, 9)] == [1.0, 0.1]


def test_a_longer_run_follows_its_longer_schedule_and_says_so(tmp_path: Path) -> None:
    """The rate goes on where the new cosine is at that step; another floor is refused by name."""

    def trained(steps: int, until: int, floor: float = 0.0) -> float:
        module = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        length = RunLength(samples=60, steps_per_epoch=6, epochs=1, steps=steps)
        schedule = build_scheduler(CosineConfig(name="cosine", floor=floor), optimizer, length)
        with Session(
            tmp_path, device="cpu", allow_changed=lengths(schedule), checks=CheckOptions(on_changed="raise")
        ) as session:
            wrapped = session.wrap(module, optimizer=optimizer, scheduler=schedule)
            for batch in session.batches(data(), global_batch_size=10, steps=until):
                with session.step() as step:
                    step.backward(0.01 * loss_of(wrapped, batch))
                    optimizer.step()
            return float(optimizer.param_groups[0]["lr"])

    assert trained(4, 4) == pytest.approx(0.0)
    with structlog.testing.capture_logs() as logs:
        assert trained(8, 4) == pytest.approx(0.5)
    (said,) = (each for each in logs if each["event"] == "setting.changed")
    assert (said["name"], said["before"], said["now"]) == ("scheduler.steps", "4", "8")
    with pytest.raises(ConfigError, match=r"'scheduler\.floor' is 0\.1 here and was 0\.0"):
        trained(8, 6, floor=0.1)


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        ("training.config", "jobs.config", "JobConfig"),
        ("training.loading", "jobs.config", "load_job"),
        ("training.loggers", "jobs.loggers", "register_logger"),
        ("training.sharding", "checkpoint.codec", "whole"),
        ("training.trainer", "jobs.trainer", "Trainer"),
        ("tasks.vision.digits", "jobs.digits", "Digits"),
        ("tasks.language.corpus", "jobs.corpus", "load_corpus"),
        ("tasks.language.gpt", "jobs.gpt", "token_losses"),
        ("tasks.language.transformer", "jobs.gpt", "Transformer"),
    ],
)
def test_earlier_names_of_modules_give_the_same_objects(before: str, now: str, name: str) -> None:
    """Not copies, of which a job would not take one for the other."""
    old, new = (import_module(f"elastic_trainer.{module}") for module in (before, now))
    assert getattr(old, name) is getattr(new, name)


@pytest.mark.parametrize("name", ["training", "tasks.language.gpt_sample", "tasks.scripts.ddp_script_elastic"])
def test_earlier_names_of_programs_can_be_run(name: str) -> None:
    """``python -m`` finds them."""
    import_module("elastic_trainer.tasks")
    spec = find_spec(f"elastic_trainer.{name}")
    assert spec is not None
    assert spec.origin is not None
