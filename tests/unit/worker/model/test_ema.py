"""An average of the parameters moves with each committed step, and is saved and resumed with the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from elastic_trainer.worker.session import Session
from tests.unit.worker.toys import data, linear, loss_of, steps

DECAY = 0.5


def trained(directory: Path | None, epochs: int, average: float | None = DECAY) -> tuple[nn.Module, nn.Module | None]:
    torch.manual_seed(1)
    with Session(directory, device="cpu", checkpoint_every_s=None) as session:
        optimizer, wrapped = linear(session, average=average)
        list(steps(session, optimizer, wrapped, 20, epochs=epochs))
        return wrapped, session.average if average is not None else None


def test_it_is_the_exponential_moving_average_of_the_parameters() -> None:
    expected: torch.Tensor | None = None
    with Session(device="cpu") as session:
        optimizer, wrapped = linear(session, average=DECAY)
        for _ in steps(session, optimizer, wrapped, 20, epochs=2):
            now = wrapped.weight.detach().clone()
            expected = now if expected is None else DECAY * expected + (1 - DECAY) * now
            assert torch.allclose(session.average.get_parameter("weight"), expected)


def test_it_may_begin_with_a_resumed_training_that_had_none(tmp_path: Path) -> None:
    """Then it begins at the resumed parameters; and a training may go on without it."""
    trained(tmp_path, 1, average=None)
    trained(tmp_path, 2)
    trained(tmp_path, 3, average=None)


def test_evaluating_leaves_the_statistics_that_the_average_was_given() -> None:
    """Of ``update_bn()``, or averaged with ``use_buffers=True``: what is measured and saved is what the user made."""
    torch.manual_seed(1)
    with Session(device="cpu") as session:
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        average = AveragedModel(module, use_buffers=True)
        wrapped = session.wrap(module, optimizer=optimizer, average=average)
        list(steps(session, optimizer, wrapped, 20, epochs=2))
        x, y = data().tensors
        update_bn([x], session.average)
        kept = {name: each.clone() for name, each in average.state_dict().items()}
        with torch.no_grad():
            expected = float(nn.functional.mse_loss(session.average.eval()(x), y))
        measured = session.evaluate(
            session.average, data(), 60, lambda model, batch: {"mse": (loss_of(model, batch), 1)}
        )
        assert measured["mse"] == pytest.approx(expected)
        assert all(torch.equal(each, kept[name]) for name, each in average.state_dict().items())
