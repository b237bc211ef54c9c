"""What scripts do that were written without this package in mind: ``habits.py SCENARIO``, as for job.py.

``habit``: ``loop`` (computes micro-batches, and says of how many samples), ``naive`` (logs, evaluates and saves behind
each step, committed or not), ``closure`` (gives one to the optimizer, and has a buffer that each pass replaces),
``driven`` (begins and ends steps itself, as frameworks do), ``gan`` (two models, each with an optimizer), ``loader``
(has a StatefulDataLoader with processes of its own), ``streams`` (reads streams that keep their own state) or ``lora``
(trains PEFT's adapters of a frozen model).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from elastic_trainer import Session, Streams
from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.steps.options import CheckOptions
from tests.drills.inplace.scripts.job import Scenario
from tests.unit.worker.toys import data, loss_of


class Net(nn.Module):
    """A layer, and how many forward passes there have been."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(4, 1)
        self.before: Callable[[], None] = lambda: None
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        self.passes = self.passes + 1.0
        out: torch.Tensor = self.layer(x)
        return out


class Numbers(IterableDataset[Any]):
    """One stream of 20 samples, which keeps where it is; ``most`` were read of one without a state to begin from."""

    most = 0

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards, self.read, self.began = shard, shards, 0, 0

    def __iter__(self) -> Iterator[Any]:
        x, y = data().tensors
        while self.read < 20:
            number = (self.read * self.shards + self.shard) % len(x)
            self.read += 1
            Numbers.most = max(Numbers.most, self.read - self.began)
            yield x[number], y[number]

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = self.began = state["read"]


def generator() -> nn.Module:
    torch.manual_seed(6)
    return nn.Linear(4, 4)


def adapted() -> Any:
    """A frozen layer with a low-rank adapter, and one that is trained whole."""
    from peft import LoraConfig, get_peft_model  # slow to import

    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return get_peft_model(layers, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def squared(module: nn.Module, batch: Any) -> dict[str, tuple[Any, int]]:
    return {"error": (((module(batch.x) - batch.y) ** 2).sum(), len(batch))}


class Job:
    def __init__(self, session: Session, scenario: Scenario) -> None:
        self.session, self.scenario = session, scenario
        self.module = Net()
        lbfgs = scenario.values["optimizer"] == "lbfgs"
        kind: Any = torch.optim.LBFGS if lbfgs else torch.optim.AdamW
        self.optimizer = kind(self.module.parameters(), lr=0.5 if lbfgs else 0.01)
        self.generator: nn.Module = nn.Identity()
        """The second model, if there is one."""
        self.lines: list[str] = []

    def wrap(self) -> None:
        self.model = self.session.wrap(self.module, optimizer=self.optimizer)
        ordered = self.scenario.values.get("unshuffled", False)
        passes = self.scenario.values.get("passes")
        steps = self.scenario.values.get("steps")
        length: Any = {"epochs": 2} if steps is None else {"steps": steps}
        self.batches = self.session.batches(data(), global_batch_size=16, shuffle=not ordered, passes=passes, **length)

    def fail(self, where: str) -> None:
        self.scenario.at(self.session.step_number + 1, where, self.session)

    def naive(self) -> None:
        self.wrap()
        with pytest.raises(ConfigError, match="to change parameters of the wrapped model"):
            torch.optim.SGD(trained(self.module), lr=1.0).step()
        for batch in self.batches:
            with self.session.step() as step:
                step.want_loss()
                self.fail("forward")
                step.backward(loss_of(self.model, batch))
                self.fail("before_update")
                self.optimizer.step()
            later = step.later_loss().read()
            self.lines.append(f"{self.session.step_number} {step.loss:.4f} {later is None}")
            if self.session.step_number % 2 == 0:
                self.session.evaluate(self.model, data(), 20, squared)
            self.session.save()

    def loader(self) -> None:
        from elastic_trainer.integrations.torchdata import StatefulDataLoader  # slow to import

        self.model = self.session.wrap(self.module, optimizer=self.optimizer)
        dataset = data()
        sampler = self.session.sampler(dataset, global_batch_size=16, shuffle=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            loader = StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)
        self.batches = sampler.batches(loader, epochs=2)
        self.train()

    def streams(self) -> None:
        self.model = self.session.wrap(self.module, optimizer=self.optimizer)
        streams = Streams(Numbers, 4, state_every=2)
        self.batches = self.session.batches(streams, global_batch_size=16, shuffle=False, steps=8)
        self.train()
        self.lines.append(str(Numbers.most))

    def lora(self) -> None:
        module = self.generator = adapted()
        self.optimizer = torch.optim.AdamW(trained(module), lr=0.01)
        self.model = self.session.wrap(module, optimizer=self.optimizer)
        self.batches = self.session.batches(data(), global_batch_size=16, shuffle=False, epochs=2)
        self.train()
        self.lines = list(self.model.state_dict())
        self.model.save_pretrained(f"{self.scenario.node}-adapter")

    def loop(self) -> None:
        self.wrap()
        self.train()

    def train(self) -> None:
        """``retry``: until a step has committed the batch at hand; ``held``: with tensors read before the first try."""
        values = self.scenario.values
        for batch in self.batches:
            held = (batch.x, batch.y) if values.get("held") else None
            while True:
                sizes = []
                with self.session.step() as step:
                    for part in step.micro_batches():
                        sizes.append(len(part))
                        x, y = held or (part.x, part.y)
                        loss = nn.functional.mse_loss(self.model(x), y)
                        self.fail("forward")
                        step.backward(loss)
                    self.fail("before_update")
                    self.optimizer.step()
                self.lines.append(f"{step.number} {step.committed} {sizes}")
                if step.committed and self.session.step_number % 3 == 0 and "checkpoints" in values:
                    self.session.save()
                if batch.used or not values.get("retry"):
                    break

    def driven(self) -> None:
        self.wrap()
        self.module.before = lambda: self.fail("forward")
        for _ in self.batches:
            step = self.session.begin_step()
            passes = 0
            for part in step.micro_batches():
                loss = loss_of(self.model, part)
                loss.register_hook(lambda gradient: self.fail("backward"))  # type: ignore[no-untyped-call]
                step.backward(loss)
                passes += 1
            step.update()
            self.lines.append(f"{step.number} {passes} {step.lost} {step.end()}")

    def gan(self) -> None:
        """Both are trained in each step, the discriminator in two passes; it is frozen for the generator's."""
        critic, maker = self.module, generator()
        self.generator = maker
        optimizers = {"critic": self.optimizer, "maker": torch.optim.SGD(maker.parameters(), lr=0.1, momentum=0.9)}
        schedule = {"maker": torch.optim.lr_scheduler.ExponentialLR(optimizers["maker"], 0.9)}
        self.session.wrap({"critic": critic, "maker": maker}, optimizer=optimizers, scheduler=schedule)
        for batch in self.session.batches(data(), global_batch_size=16, epochs=2, shuffle=False):
            with self.session.step() as step:
                step.want_loss()
                critic.requires_grad_(True)
                fake = maker(batch.x)
                self.fail("forward")
                step.backward(nn.functional.mse_loss(critic(batch.x), batch.y))
                step.backward(critic(fake.detach()).square().mean())
                nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
                optimizers["critic"].step()
                self.fail("between")
                critic.requires_grad_(False)
                step.backward((critic(fake) - 1.0).square().mean())
                self.fail("before_update")
                optimizers["maker"].step()
            if step.committed and (loss := step.later_loss().read()) is not None:
                self.lines.append(f"{step.number} {loss:.4f}")
            if self.session.step_number % 2 == 0:
                self.session.save()

    def closure(self) -> None:
        self.wrap()
        for batch in self.batches:
            with self.session.step() as step:
                calls = count()

                def closure(step: Any = step, batch: Any = batch, calls: Any = calls) -> torch.Tensor:
                    self.optimizer.zero_grad()
                    loss = loss_of(self.model, batch)
                    if next(calls) == self.scenario.values["at_call"]:
                        self.fail("backward")
                    step.backward(loss)
                    return loss

                self.optimizer.step(closure)
            if step.committed:
                self.lines.append(f"{step.loss:.4f}")


def main(scenario: Scenario) -> None:
    torch.set_num_threads(1)
    directory, checks = scenario.values.get("checkpoints"), CheckOptions(**scenario.values.get("checks", {}))
    with Session(directory, seed=3, device="cpu", checkpoint_every_s=None, checks=checks) as session:
        job = Job(session, scenario)
        getattr(job, scenario.values["habit"])()
    result = {
        "pid": os.getpid(),
        "state": [each.flatten().tolist() for part in (job.module, job.generator) for each in part.parameters()],
        "passes": float(job.module.passes),
        "lines": job.lines,
        "step": session.step_number,
    }
    Path(f"{scenario.node}.result").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Scenario(sys.argv[1]))
