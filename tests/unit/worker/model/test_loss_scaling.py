"""A GradScaler within a step."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.worker.steps.engine import Scaling


@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_overflow_in_the_shard_of_another_rank_skips_the_update_here_too(elsewhere: bool) -> None:
    """And lowers the scale, though all gradients here are finite; also if the script steps without clipping."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler, asked = torch.amp.GradScaler("cpu", init_scale=64.0), list[bool]()

    def anywhere(here: bool) -> bool:
        asked.append(here)
        return here or elsewhere

    scaling = Scaling(scaler, optimizer, anywhere)
    scaling.begin()
    scaling.scaled(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    assert asked == [False]
    assert bool((weight == (1.0 if elsewhere else 0.5)).all())
    scaling.after_update()
    assert scaler.get_scale() == (32.0 if elsewhere else 64.0)
