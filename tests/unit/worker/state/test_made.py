"""What a resumed life finds changed in its script: kept and said, refused, or taken from there on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import data, loss_of

Make = Callable[[torch.optim.Optimizer], Any]


class Life:
    """A script's life: what it has made, and its steps."""

    def __init__(
        self,
        directory: Path,
        make: Make | None = None,
        *,
        allow: tuple[str, ...] = (),
        strict: bool = False,
        frozen: bool = False,
        **options: Any,
    ) -> None:
        checks = CheckOptions(on_changed="raise" if strict else "warn")
        self.session = Session(directory, device="cpu", checkpoint_every_s=None, allow_changed=allow, checks=checks)
        self.make, self.frozen, self.options = make, frozen, {"lr": 0.1, "momentum": 0.5, **options}

    def __enter__(self) -> Life:
        self.session.__enter__()
        self.module = nn.Sequential(layer := nn.Linear(4, 4), nn.Linear(4, 1))
        self.layer = layer.requires_grad_(not self.frozen)
        self.optimizer = torch.optim.SGD(self.module.parameters(), **self.options)
        scheduler = self.make(self.optimizer) if self.make is not None else None
        self.wrapped = self.session.wrap(self.module, optimizer=self.optimizer, scheduler=scheduler)
        return self

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)

    def train(self, steps: int) -> None:
        for batch in self.session.batches(data(), global_batch_size=10, steps=steps):
            with self.session.step() as step:
                step.backward(0.01 * loss_of(self.wrapped, batch))
                self.optimizer.step()

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]


def test_settings_of_the_life_that_saved_go_on_and_this_is_said(tmp_path: Path) -> None:
    """As a script may make its learning rate from the number of ranks, which a fault changes, it is no error."""
    with Life(tmp_path) as first:
        first.train(2)
    with structlog.testing.capture_logs() as logs, Life(tmp_path, lr=0.2, momentum=0.9) as again:
        again.train(4)
        assert (again.group["lr"], again.group["momentum"]) == (0.1, 0.5)
    said = {each["name"]: (each["here"], each["kept"]) for each in logs if each["event"] == "setting.kept"}
    assert said == {"optimizer.lr": ("0.2", "0.1"), "optimizer.momentum": ("0.9", "0.5")}
    with structlog.testing.capture_logs() as logs, Life(tmp_path):
        pass
    assert not [each for each in logs if each["event"].startswith("setting.")]


@pytest.mark.parametrize("name", ["optimizer.lr", "optimizer.momentum", "scheduler.T_max"])
def test_a_job_is_refused_by_the_name_of_the_setting(tmp_path: Path, name: str) -> None:
    key = name.partition(".")[2]
    with Life(tmp_path, lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4)) as first:
        first.train(2)
    longer = {"T_max": 8} if key == "T_max" else {"T_max": 4}
    changed: dict[str, Any] = {} if key == "T_max" else {key: 0.25}
    with (
        pytest.raises(ConfigError, match=rf"'{name}' is .* here and was .*--allow-changed {name}"),
        Life(tmp_path, lambda optimizer: schedules.CosineAnnealingLR(optimizer, **longer), strict=True, **changed),
    ):
        pass


@pytest.mark.parametrize(
    "make",
    [
        None,
        lambda optimizer, length=20: schedules.CosineAnnealingLR(optimizer, length),
        lambda optimizer, length=20: schedules.OneCycleLR(optimizer, 0.3, total_steps=length),
        lambda optimizer, length=20: schedules.SequentialLR(
            optimizer, [schedules.LinearLR(optimizer, 0.5, total_iters=3), schedules.StepLR(optimizer, length)], [3]
        ),
    ],
)
def test_what_is_allowed_to_change_counts_as_if_it_had_been_so_from_the_first(tmp_path: Path, make: Any) -> None:
    """The learning rate of each further step is that of a run which began with the new settings."""
    allow = ("optimizer.lr", "optimizer.weight_decay", *(("scheduler",) if make is not None else ()))
    longer = None if make is None else lambda optimizer: make(optimizer, 30)
    with Life(tmp_path / "run", make) as first:
        first.train(5)
    rates = []
    with Life(tmp_path / "run", longer, allow=allow, lr=0.4, weight_decay=0.01) as again:
        assert again.group["weight_decay"] == 0.01
        for steps in (6, 7, 8):
            again.train(steps)
            rates.append(again.group["lr"])
    with Life(tmp_path / "new", longer, lr=0.4, weight_decay=0.01) as new:
        new.train(5)
        for steps, rate in zip((6, 7, 8), rates, strict=True):
            new.train(steps)
            assert new.group["lr"] == pytest.approx(rate)
    with Life(tmp_path / "run", longer, strict=True, lr=0.4, weight_decay=0.01) as later:
        assert later.group["lr"] == rates[-1]  # and what was taken is what the next life is compared with


def test_what_cannot_be_taken_over_is_refused(tmp_path: Path) -> None:
    """A setting that is not there, and a new schedule that is too short."""
    with pytest.raises(ConfigError, match=r"no setting 'optimizer\.rate' .here are .*optimizer\.lr"):
        Life(tmp_path, allow=("optimizer.rate",)).__enter__()

    def cycle(optimizer: torch.optim.Optimizer, steps: int = 9) -> Any:
        return schedules.OneCycleLR(optimizer, 0.3, total_steps=steps)

    with Life(tmp_path, cycle) as first:
        first.train(6)
    short = Life(tmp_path, lambda optimizer: cycle(optimizer, 4), allow=("scheduler.total_steps",))
    with pytest.raises(ConfigError, match="does not go as far as the training, step 6"), short:
        pass


def test_a_layer_unfrozen_before_the_checkpoint_is_trained_by_the_next_life(tmp_path: Path) -> None:
    """It froze it again, as it did at first; one that freezes another layer is followed."""
    with Life(tmp_path, frozen=True) as first:
        first.train(2)
        first.layer.requires_grad_(True)
        first.train(4)
    with Life(tmp_path, frozen=True) as again:
        before = again.layer.weight.clone()
        again.train(5)
        assert not torch.equal(again.layer.weight, before)
    with structlog.testing.capture_logs() as logs, Life(tmp_path) as third:
        third.layer.requires_grad_(False)
        third.train(6)
    with Life(tmp_path) as fourth:
        assert not any(each.requires_grad for each in fourth.layer.parameters())
    assert [(each["before"], each["now"]) for each in logs if each["event"] == "setting.changed"] == [
        ("0.weight, 0.bias", "none")
    ]
