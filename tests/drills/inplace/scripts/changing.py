"""Trainings that change what they train: ``changing.py RESULT REDUCTION[:MISTAKE] ...``, what comes first last.

The first layer is outside of the optimizer, the second one is frozen in it, the third one frozen and outside.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.errors import ConfigError

SAMPLES, BATCH, MICRO, CLIP = 96, 8, 2, 0.05
FIRST, SECOND, THIRD, LAST = 0, 2, 4, 6
"""The layers."""


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(5)
    sizes = (4, 6, 6, 6, 1)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).double()
    for place in (SECOND, THIRD):
        model[place].requires_grad_(False)
    return model, torch.optim.SGD([*model[SECOND].parameters(), *model[LAST].parameters()], lr=0.5, momentum=0.9)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def change(model: nn.Sequential, optimizer: torch.optim.Optimizer, done: int) -> None:
    """What the script does behind step number ``done``."""
    if done == 3:
        model[SECOND].requires_grad_(True)
    if done == 5:
        model[THIRD].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[THIRD].parameters()), "lr": 0.1})
    if done == 8:
        for parameter in model[LAST].parameters():
            parameter.requires_grad = False


def plain_loop() -> list[torch.Tensor]:
    model, optimizer = build()
    x, y = data()
    for step in range(SAMPLES // BATCH):
        part = slice(step * BATCH, (step + 1) * BATCH)
        model.zero_grad()
        nn.functional.mse_loss(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        change(model, optimizer, step + 1)
    return [each.detach() for each in model.parameters()]


class Trained:
    """One session of this job. ``wrong``: what is done in its third step that nobody can follow."""

    def __init__(self, reduction: str, wrong: str = "", *, scaled: bool = False) -> None:
        self.model, self.optimizer = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        self.said = ""
        self._wrong = wrong
        self.rank = 0
        with Session(device="cpu", checkpoint_every_s=None) as session:
            self._wrapped = session.wrap(self.model, optimizer=self.optimizer, scaler=scaler, reduction=reduction)
            self.rank = session.rank
            self._train(session)

    def _train(self, session: Session) -> None:
        for batch in self._batches(session, 1):
            wrong = self._wrong if session.step_number == 2 else ""
            if wrong == "replaced":
                self.model[FIRST] = nn.Linear(4, 6).double()
                self.optimizer.add_param_group({"params": list(self.model[FIRST].parameters())})
            if wrong == "apart":
                self.model[SECOND if session.rank else THIRD].requires_grad_(True)
            with session.step() as step:
                if wrong == "inside":
                    self.model[SECOND].requires_grad_(True)
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(self._wrapped(part.x), part.y))
                step.clip(CLIP)
                self.optimizer.step()
            change(self.model, self.optimizer, session.step_number)
        if self._wrong == "bypass":
            self._bypass(session)

    def _bypass(self, session: Session) -> None:
        batch = next(self._batches(session, 2))
        try:
            with session.step() as step:
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(self.model(part.x), part.y))
                self.optimizer.step()
        except ConfigError as error:
            self.said = str(error)

    def _batches(self, session: Session, epochs: int) -> Any:
        dataset = TensorDataset(*data())
        return session.batches(dataset, global_batch_size=BATCH, micro_batch_size=MICRO, shuffle=False, epochs=epochs)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [each.detach() for each in self.model.parameters()]


def refusal(reduction: str, wrong: str) -> str:
    try:
        Trained(reduction, wrong)
    except ConfigError as error:
        return str(error)
    return ""


def main(result: Path, job: str, *mistakes: str) -> None:
    torch.set_num_threads(1)
    refused = [refusal(*each.split(":")) for each in mistakes]
    trained = Trained(*job.split(":"))
    torch.save([[*refused, trained.said], trained.parameters], f"{result}-{os.getpid()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
