"""Trainings of ranks that average now and then, and the same in a plain loop: ``apart.py SCENARIO``, as job.py's."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer import Session
from elastic_trainer.data.plan import cut
from elastic_trainer.worker.model.local import LocalReplica
from tests.drills.inplace.scripts.job import LOST, Scenario
from tests.unit.worker.toys import Counter

SAMPLES, BATCH, EVERY, EPOCHS = 96, 8, 5, 2
ENDS = (5, 10, 12, 15, 20, 24)
"""The steps that a synchronisation follows: multiples of 5, and the end of an epoch."""
STEPS = ENDS[-1]
LR, GAMMA, OUTER_LR, OUTER_MOMENTUM = 0.05, 0.97, 0.7, 0.9


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    return module, torch.optim.AdamW(module.parameters(), lr=LR)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def simulated(reduction: str, rounds: Sequence[str], healed: Sequence[str] = ()) -> list[torch.Tensor]:
    """Parameters and buffers at the end of a plain loop. ``rounds`` are the ranks of each outer step, a letter each.

    Ranks that are new begin with the first one's inner optimizer, as do those ``healed`` (letter and outer step).
    """
    first, (x, y) = build()[0], data().tensors
    shared, buffers = [each.detach() for each in first.parameters()], list(first.buffers())
    momentum: list[torch.Tensor] = []
    inner: dict[str, Any] = {}
    for number, (end, ranks) in enumerate(zip(ENDS, rounds, strict=True)):
        apart = []
        for rank, name in enumerate(ranks):
            module, optimizer = build()
            for tensor, value in zip([*module.parameters(), *module.buffers()], [*shared, *buffers], strict=True):
                tensor.data.copy_(value)
            known = inner.get(name) if f"{name}{number}" not in healed else None
            if (known := known or inner.get(ranks[0])) is not None:
                optimizer.load_state_dict(copy.deepcopy(known))
            for step in range(ENDS[number - 1] if number else 0, end):
                begin, stop = (step * BATCH % SAMPLES + place for place in cut(BATCH, len(ranks), rank))
                optimizer.zero_grad()
                nn.functional.mse_loss(module(x[begin:stop]), y[begin:stop]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] *= GAMMA
            parts = [each.detach() for each in module.parameters()]
            apart.append((parts, list(module.buffers()), name, optimizer.state_dict()))
        inner, buffers = {name: state for *_, name, state in apart}, apart[0][1]
        means = [sum(each[1:], each[0]) / len(each) for each in zip(*(parts for parts, *_ in apart), strict=True)]
        if reduction == "local_sgd":
            shared = means
            continue
        outer = [old - new for old, new in zip(shared, means, strict=True)]
        momentum = momentum or outer
        if number:
            momentum = [old * OUTER_MOMENTUM + new for old, new in zip(momentum, outer, strict=True)]
        steps = [new.add(old, alpha=OUTER_MOMENTUM) for new, old in zip(outer, momentum, strict=True)]
        shared = [old.add(step, alpha=-OUTER_LR) for old, step in zip(shared, steps, strict=True)]
    return shared + buffers


def trained(
    reduction: str,
    at: Callable[[int, str, Session], None] = lambda step, where, session: None,
    directory: str | None = None,
) -> dict[str, Any]:
    """What a session gives. ``at(step, where, session)`` is called where faults can be."""
    counter, seen, losses_seen = Counter(), [], []
    with Session(directory, device="cpu", checkpoint_every_steps=EVERY, checkpoint_every_s=None) as session:
        session.register("counter", counter)
        module, optimizer = build()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        wrapped = session.wrap(module, optimizer=optimizer, scheduler=scheduler, reduction=reduction, sync_every=EVERY)
        for batch in session.batches(data(), global_batch_size=BATCH, shuffle=False, epochs=EPOCHS):
            number = session.step_number + 1
            at(number, "drawn", session)
            with session.step() as step:
                for part in step.micro_batches(batch):
                    losses = nn.functional.mse_loss(wrapped(part.x), part.y, reduction="none")
                    step.backward(losses.sum(), count=float(len(part.y)))
                optimizer.step()
            seen.append(number)
            if step.committed and number % 4 == 0:
                losses_seen.append(step.loss)  # a sum of all ranks, which may find out that one is gone
            if step.committed:
                counter.values.append(number)
            at(number, "after_step", session)
    return {
        "state": [each.detach() for each in [*module.parameters(), *module.buffers()]],
        "counter": counter.values,
        "seen": seen,
        "losses": losses_seen,
        "resumed_from": session.resumed_from,
        "pid": os.getpid(),
    }


def behind(scenario: Scenario) -> None:
    """Let the synchronisation of the scenario's ``behind`` (counted on this node) fail when it was one of all ranks."""
    original, made = LocalReplica.synchronise, [0]

    def synchronise(self: LocalReplica, *arguments: Any) -> None:
        original(self, *arguments)
        made[0] += 1
        if scenario.values.get("behind") == [scenario.node, made[0]]:
            raise RuntimeError(LOST)

    LocalReplica.synchronise = synchronise  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("ELASTIC_TRAINER_NODE", os.environ.get("RANK", "0"))
    scenario = Scenario(sys.argv[1])
    behind(scenario)
    torch.save(
        trained(scenario.values["reduction"], scenario.at),
        Path(scenario.values.get("into", ".")) / f"{scenario.node}.result",
    )
