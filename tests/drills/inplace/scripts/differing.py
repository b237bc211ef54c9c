"""A training whose ranks are made to differ: ``differing.py RESULT CASE ...``, a session for each case in turn.

A case is ``EVERY:ON_DIFFERENCE:STEP``: behind that step one rank changes a parameter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from elastic_trainer import Session
from elastic_trainer.errors import DifferError
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.toys import data, loss_of, model

ODD_ONE = 0
"""Rank 0 is the odd one: of two ranks its state counts, of three that of the others."""


def trained(every: int | None, on_difference: str, spoiled: int) -> tuple[str, list[torch.Tensor]]:
    with Session(device="cpu", checks=CheckOptions(compare_every_steps=every, on_difference=on_difference)) as session:
        torch.manual_seed(4)
        module = model(dropout=0.0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        wrapped = session.wrap(module, optimizer=optimizer)
        for batch in session.batches(data(120), global_batch_size=10, epochs=1):
            with session.step() as step:
                step.backward(loss_of(wrapped, batch))
                optimizer.step()
            if session.step_number == spoiled and session.rank == ODD_ONE:
                with torch.no_grad():
                    weight = module.get_parameter("4.weight")
                    weight[0, :2] = weight[0, :2].flip(0)  # two elements change places
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    return "", [*(each.detach() for each in module.parameters()), *moments]


def case(text: str) -> tuple[str, list[torch.Tensor]]:
    every, on_difference, spoiled = text.split(":")
    try:
        return trained(int(every) or None, on_difference, int(spoiled))
    except DifferError as error:
        return str(error), []


if __name__ == "__main__":
    torch.set_num_threads(1)
    ended = [case(each) for each in sys.argv[2:]]
    torch.save(ended, Path(f"{sys.argv[1]}-{os.getpid()}"))
