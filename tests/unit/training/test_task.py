"""Tasks are found by name, and check what the job file says in their sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import JobConfig, Section
from elastic_trainer.jobs.task import Datasets, Task, find_task
from elastic_trainer.jobs.trainer import measurable


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


def test_tasks_are_found_by_short_name_and_by_module() -> None:
    assert find_task("mnist").__module__ == "elastic_trainer.jobs.mnist"
    assert find_task(f"{__name__}:Line") is Line


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


def test_a_users_module_with_a_missing_import_is_not_blamed_on_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that fails inside the user's module is the module's error and keeps its traceback."""
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
    """From its own options; the effective configuration reads back equal, and needs no options to be complete."""
    config = JobConfig.model_validate({"task": "line", "epochs": 1, "options": {"half": 3}})
    task = Doubling(config)
    assert task.config.global_batch == 6
    assert Doubling(task.config).config == task.config
    assert Line(_job()).config.samples_per_step == 2


def test_a_job_file_and_its_options_must_not_contradict_each_other() -> None:
    """Which of them is meant, nobody knows."""
    with pytest.raises(ConfigError, match=r"task line: 'global_batch' is 5, but its options make it 4"):
        Doubling(_job(global_batch=5))


def test_what_neither_says_is_missing() -> None:
    """Told when the task is known; a job file without options is refused when it is read."""
    config = JobConfig.model_validate({"task": "line", "epochs": 1, "options": {"half": 3}})
    with pytest.raises(ConfigError, match=r"task line: 'global_batch' is missing"):
        Silent(config)
    with pytest.raises(ConfigError, match=r"'global_batch' is missing"):
        _ = config.samples_per_step


def test_metrics_that_follow_from_others_can_choose_the_best_checkpoint() -> None:
    """They are known by name beforehand, like those that are measured."""
    task = Doubling(_job(global_batch=None, options={"half": 1}))
    assert measurable(task, task.model(), task.datasets().test) == ["error", "root"]
