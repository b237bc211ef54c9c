"""How long a run is, when it is evaluated, and what the learning rate is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import (
    ConstantConfig,
    CosineConfig,
    EvaluationConfig,
    JobConfig,
    MultiStepConfig,
    SchedulerConfig,
    StepConfig,
)
from elastic_trainer.jobs.task import (
    RunLength,
    build_scheduler,
    epochs_done,
    evaluation_due,
    lengths,
    rate_factor,
    run_length,
)
from elastic_trainer.model import Cursor
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import data, loss_of

LENGTH = RunLength(samples=100, steps_per_epoch=4, epochs=3, steps=12)


def _job(**values: object) -> JobConfig:
    return JobConfig.model_validate({"task": "x", "global_batch": 30, **values})


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
    assert run_length(_job(**values), 100) == expected


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
    assert LENGTH.finished(cursor, step) is finished


def test_a_run_is_finished_by_the_steps_that_it_may_take_at_most() -> None:
    length = RunLength(samples=100, steps_per_epoch=4, epochs=3, steps=7, max_steps=7)
    assert not length.finished(Cursor(1, 60), 6)
    assert length.finished(Cursor(1, 90), 7)


def test_the_end_of_an_epoch_is_recognised_before_and_after_the_cursor_moves_on() -> None:
    """A checkpoint taken between the last step of an epoch and its evaluation leads to that evaluation."""
    config = EvaluationConfig(every_epochs=1)
    assert evaluation_due(config, LENGTH, Cursor(0, 100), 4)
    assert evaluation_due(config, LENGTH, Cursor(1, 0), 4)
    assert epochs_done(Cursor(0, 100), 100) == epochs_done(Cursor(1, 0), 100) == 1
    assert not evaluation_due(config, LENGTH, Cursor(0, 90), 3)
    assert not evaluation_due(config, LENGTH, Cursor(0, 0), 0)


def test_evaluation_follows_epochs_or_steps_or_only_the_end() -> None:
    steps_only = EvaluationConfig(every_epochs=None, every_steps=3)
    due = [step for step in range(13) if evaluation_due(steps_only, LENGTH, _cursor_after(step), step)]
    assert due == [3, 6, 9, 12]
    second = EvaluationConfig(every_epochs=2)
    assert [s for s in range(13) if evaluation_due(second, LENGTH, _cursor_after(s), s)] == [8, 12]
    never = EvaluationConfig(every_epochs=None)
    assert [s for s in range(13) if evaluation_due(never, LENGTH, _cursor_after(s), s)] == [12]


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


@pytest.mark.parametrize("milestones", [[], [2, 1], [1, 1], [0], [-1, 3]])
def test_milestones_must_rise_from_above_zero(milestones: list[float]) -> None:
    with pytest.raises(ValueError, match="milestones"):
        MultiStepConfig.model_validate({"name": "multistep", "milestones": milestones})


def test_a_cosine_begins_at_one_and_ends_at_its_floor() -> None:
    config = CosineConfig(name="cosine", floor=0.1, warmup_steps=2)
    factors = [rate_factor(config, step, LENGTH) for step in range(14)]
    assert factors[:3] == [1 / 3, 2 / 3, 1.0]
    assert math.isclose(factors[7], 0.55)
    assert factors[12] == factors[13] == 0.1


@given(
    step=st.integers(0, 10_000),
    warmup=st.integers(0, 100),
    floor=st.floats(0, 1),
    steps=st.integers(1, 5_000),
)
def test_a_factor_is_always_between_zero_and_one(step: int, warmup: int, floor: float, steps: int) -> None:
    length = RunLength(samples=steps, steps_per_epoch=steps, epochs=1, steps=steps)
    config = CosineConfig(name="cosine", floor=floor, warmup_steps=warmup)
    assert 0.0 <= rate_factor(config, step, length) <= 1.0 + 1e-12


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
