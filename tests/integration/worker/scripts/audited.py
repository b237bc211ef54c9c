"""Trains with audits under torchrun, each rank as a node of its own: ``audited.py FAULTS CLEAN RESULT``.

First with FAULTS, each one flipped bit of one rank: in a gradient, in an activation, or in a weight. Then CLEAN steps
without faults, with audits and without: their final states must be equal.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from elastic_trainer import Session
from elastic_trainer.worker.steps.options import CheckOptions

KINDS = ("gradient", "activation", "weight")
APART = 3
"""Steps from one fault to the next."""


@dataclass(frozen=True)
class Fault:
    step: int
    kind: str
    rank: int
    bit: int
    place: float


class Flips:
    """Flips the bit of a fault that is due on this rank, once."""

    def __init__(self, model: nn.Sequential, faults: list[Fault]) -> None:
        self.due: Fault | None = None
        self._faults = {each.step: each for each in faults}
        model[4].register_forward_hook(lambda module, args, output: self._flipped("activation", output))
        self._weight = model.get_parameter("4.weight")
        for parameter in (model.get_parameter("0.weight"), self._weight):
            parameter.register_hook(lambda gradient: self._flipped("gradient", gradient))  # type: ignore[no-untyped-call]

    def begin(self, step: int, rank: int) -> None:
        found = self._faults.get(step)
        self.due = self._faults.pop(step) if found is not None and found.rank == rank else None
        self._flipped("weight", self._weight.data, self._weight.data)

    def _flipped(self, kind: str, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor | None:
        if self.due is None or self.due.kind != kind:
            return None
        changed = tensor.detach().clone()
        flat = changed.view(-1).view(torch.int32)
        flat[int(self.due.place * len(flat))] ^= 1 << self.due.bit
        assert not torch.equal(changed, tensor)
        self.due = None
        if into is not None:
            into.copy_(changed)
            return None
        return tensor + (changed - tensor.detach()) if kind == "activation" else changed


def trained(
    faults: list[Fault],
    steps: int,
    audit_every: int | None,
    reduction: str = "ddp",
    pace_s: float = 0.0,
    **more: str,
) -> nn.Module:
    checks = CheckOptions(audit_every=audit_every, on_difference="heal", nonfinite="warn", **more)  # type: ignore[arg-type]
    with Session(device="cpu", seed=5, checks=checks) as session:
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 24), nn.Linear(24, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        wrapped = session.wrap(model, optimizer=optimizer, reduction=reduction)
        flips = Flips(model, faults)
        generator = torch.Generator().manual_seed(6)
        rows = torch.utils.data.TensorDataset(
            torch.randn(480, 8, generator=generator), torch.randint(0, 4, (480,), generator=generator)
        )
        for _ in session.batches(rows, global_batch_size=24, micro_batch_size=4, steps=steps):
            with session.step() as step:
                flips.begin(step.number, session.rank)
                for part in step.micro_batches():
                    step.backward(nn.functional.cross_entropy(wrapped(part.x), part.y))
                optimizer.step()
            time.sleep(pace_s)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["ELASTIC_TRAINER_NODE"] = f"node-{rank}"
    chance = random.Random(world)
    faults = [
        Fault(APART * (n + 1), KINDS[n % 3], chance.randrange(world), chance.randrange(16, 23), chance.random())
        for n in range(int(sys.argv[1]))
    ]
    trained(faults, APART * (len(faults) + 1), 1)
    print("faults end", flush=True)
    clean = int(sys.argv[2])
    with_audits, without = (list(trained([], clean, every).state_dict().values()) for every in (1, None))
    equal = len(without) > 10 and all(map(torch.equal, with_audits, without))
    if rank == 0:
        planned = [(each.step, each.kind, each.rank) for each in faults]
        Path(sys.argv[3]).write_text(json.dumps({"faults": planned, "equal": equal}))
