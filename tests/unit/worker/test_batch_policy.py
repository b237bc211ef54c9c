"""What a session makes of a batch that follows the number of ranks, and of more ranks than micro-batches."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from elastic_trainer.model import Cursor
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.session import Session
from tests.unit.worker.toys import data, linear, loss_of


def first_step(directory: Path | None = None, allow: tuple[str, ...] = (), **policy: Any) -> tuple[float, float, int]:
    """How far a weight of 1 with a gradient of 1 moves, the learning rate afterwards, samples used."""
    with Session(directory, device="cpu", allow_changed=allow) as session:
        module = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        session.wrap(module, optimizer=optimizer, scheduler=scheduler)
        before = float(module.weight.detach()[0, 0])
        next(session.batches(data(), global_batch_size=16, epochs=10, **policy))
        with session.step() as step:
            step.backward(module.weight.sum())
            optimizer.step()
        return before - float(module.weight.detach()[0, 0]), optimizer.param_groups[0]["lr"], session.cursor.samples


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_one_rank_of_four_takes_a_quarter_of_the_batch(rule: str, factor: float) -> None:
    """The update is made with the scaled learning rate; the optimizer's own, and its schedule, stay as they were."""
    moved, lr, samples = first_step(scale_from=4, lr_rule=rule)
    assert moved == pytest.approx(0.1 * factor)
    assert lr == pytest.approx(0.05)
    assert samples == 4


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_update_does_not_change_the_learning_rate(again: bool) -> None:
    """The factor applies to one update only, also where the script catches the error and tries again."""
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session)
        batch = next(session.batches(data(), global_batch_size=16, epochs=1, scale_from=4, lr_rule="linear"))
        seen: list[float] = []

        def fail_once(*_: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])
            if len(seen) == 1:
                raise ValueError("once")

        optimizer.register_step_pre_hook(fail_once)
        with nullcontext() if again else pytest.raises(ValueError, match="once"), session.step() as step:
            step.backward(loss_of(wrapped, batch))
            if again:
                with pytest.raises(ValueError, match="once"):
                    optimizer.step()
            optimizer.step()
        assert seen == [pytest.approx(0.025)] * (1 + again)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_more_ranks_than_micro_batches_are_logged_once() -> None:
    """Spare ranks compute a filler of weight zero; nothing fails, and the log does not fill up."""
    with structlog.testing.capture_logs() as logs, Session(device="cpu") as session:
        linear(session)
        feed = session._here.feed
        batches = session.batches(data(), global_batch_size=8, micro_batch_size=4, epochs=1)
        feed._part = DataPart(0, 5)
        for _ in range(3):
            batch = next(batches)
            batch.used = True
            session._position.cursor = batch.following or Cursor(0, 0)
        feed._part = DataPart(0, 1)
    (said,) = [each for each in logs if each["event"] == "ranks.idle"]
    assert (said["idle"], said["world_size"], said["micro_batches"]) == (3, 5, 2)
