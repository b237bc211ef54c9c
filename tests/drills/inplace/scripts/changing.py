"""Trainings that change what they train: ``changing.py RESULT REDUCTION[:MISTAKE] ...``, what comes first last.

The first layer is outside of the optimizer, the second one is frozen in it, the third one frozen and outside.
"""

from __future__ import annotations

import os
import sys
from functools import partial
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


def trained(reduction: str, wrong: str = "", *, scaled: bool = False) -> tuple[str, list[torch.Tensor]]:
    """What is said of a call of the bare model in one more step (``wrong`` is ``bypass``), and the parameters at the
    end of one session of this job. ``wrong`` may also be what nobody can follow, done in its third step."""
    (model, optimizer), said = build(), ""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    with Session(device="cpu", checkpoint_every_s=None) as session:
        wrapped = session.wrap(model, optimizer=optimizer, scaler=scaler, reduction=reduction)
        sizes: Any = {"global_batch_size": BATCH, "micro_batch_size": MICRO, "shuffle": False}
        batches = partial(session.batches, TensorDataset(*data()), **sizes)
        for batch in batches(epochs=1):
            now = wrong if session.step_number == 2 else ""
            if now == "replaced":
                model[FIRST] = nn.Linear(4, 6).double()
                optimizer.add_param_group({"params": list(model[FIRST].parameters())})
            if now == "apart":
                model[SECOND if session.rank else THIRD].requires_grad_(True)
            with session.step() as step:
                if now == "inside":
                    model[SECOND].requires_grad_(True)
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
                step.clip(CLIP)
                optimizer.step()
            change(model, optimizer, session.step_number)
        if wrong == "bypass":
            batch = next(batches(epochs=2))
            try:
                with session.step() as step:
                    for part in step.micro_batches(batch):
                        step.backward(nn.functional.mse_loss(model(part.x), part.y))
                    optimizer.step()
            except ConfigError as error:
                said = str(error)
    return said, [each.detach() for each in model.parameters()]


def refusal(reduction: str, wrong: str) -> str:
    try:
        trained(reduction, wrong)
    except ConfigError as error:
        return str(error)
    return ""


def main(result: Path, job: str, *mistakes: str) -> None:
    torch.set_num_threads(1)
    refused = [refusal(*each.split(":")) for each in mistakes]
    said, parameters = trained(*job.split(":"))
    torch.save([[*refused, said], parameters], f"{result}-{os.getpid()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
