"""A session whose batches come from data worker processes."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.session import Session
from tests.integration.data.datasets import Holed, Words


class Augmented(Dataset[Any]):
    """Pairs with noise that is drawn anew in each epoch."""

    def __init__(self, length: int = 60) -> None:
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(4), self.x[index].sum().view(1)


def trained(directory: Path | None, *, stop_at: int | None = None, epochs: int = 3, **options: Any) -> torch.Tensor:
    """The parameters after training with dropout, from the checkpoint that is there."""
    with Session(directory, seed=3, device="cpu", checkpoint_every_s=None) as session:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped = session.wrap(model, optimizer=optimizer)
        for batch in session.batches(Augmented(), global_batch_size=16, micro_batch_size=5, epochs=epochs, **options):
            if session.step_number == stop_at:
                session.save()
                break
            with session.step() as step:
                for part in step.micro_batches(batch):
                    step.backward(nn.functional.mse_loss(wrapped(part.x), part.y))
                optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_training_with_workers_and_a_resume_ends_like_training_without(tmp_path: Path) -> None:
    """Bit by bit, although the one that was interrupted had more fetched than committed; no process is left."""
    whole = trained(None)
    trained(tmp_path, stop_at=6, workers=2, prefetch=3)
    assert not multiprocessing.active_children()
    assert torch.equal(trained(tmp_path, workers=1), whole)
    assert not multiprocessing.active_children()


def test_the_workers_go_on_from_epoch_to_epoch() -> None:
    seen: list[set[int | None]] = []
    with Session(seed=3, device="cpu") as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wrapped, data = session.wrap(model, optimizer=optimizer), Augmented()
        for _ in session.epochs(3):
            for batch in session.batches(data, global_batch_size=20, workers=2):
                with session.step() as step:
                    step.backward(wrapped(batch.x).mean())
                    optimizer.step()
            seen.append({process.pid for process in multiprocessing.active_children()})
        assert session.step_number == 9
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2
    assert not multiprocessing.active_children()


def wrapping(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.wrap(model, optimizer=optimizer), optimizer


@pytest.mark.parametrize("workers", [0, 1])
def test_the_gradient_with_bad_samples_is_the_planned_mean_over_those_present(workers: int) -> None:
    """The sum over the 13 samples that are there, divided by the 16 of the plan; they are counted."""
    with Session(device="cpu") as session:
        wrapped, optimizer = wrapping(session)
        for batch in session.batches(
            Holed(16), global_batch_size=16, micro_batch_size=8, epochs=1, workers=workers, bad_samples="skip"
        ):
            with session.step() as step:
                for part in step.micro_batches(batch):
                    step.backward(wrapped(part.x.view(-1, 1)).mean())
                (gradient,) = (p.grad for name, p in wrapped.named_parameters() if name.endswith("weight"))
                optimizer.step()
            assert gradient is not None
            assert float(gradient) == pytest.approx(sum(i for i in range(16) if i not in (1, 2, 3)) / 16)
            assert sorted(batch.ids.tolist()) == [0, *range(4, 16)]
        assert session.skipped_samples == 3


def test_a_stream_is_read_in_its_own_order_only() -> None:
    """Asking for a shuffled one is a mistake, and the message says what to do instead."""
    with Session(device="cpu") as session:
        wrapping(session)
        with pytest.raises(ConfigError, match="shuffle=False"):
            session.batches(Words(), global_batch_size=4, epochs=1)
        first = next(session.batches(Words(), global_batch_size=4, epochs=1, shuffle=False, workers=1))
        assert first.x.tolist() == [0, 1, 2, 3]


class Millions:
    fetched = 0

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        Millions.fetched += 1
        return torch.tensor(float(index))


def test_a_resume_in_the_middle_of_ten_million_samples_reads_none_of_those_before(tmp_path: Path) -> None:
    """It costs one permutation. Nobody could tell by the state how the job came there, so it is set."""
    with Session(tmp_path, device="cpu") as session:
        wrapping(session)
        session._position.cursor = Cursor(0, 128 * 40_000)
        session._position.step = 40_000
        session.save()
    with Session(tmp_path, device="cpu") as session:
        wrapping(session)
        assert session.cursor == Cursor(0, 128 * 40_000)
        began_s = time.process_time()
        batch = next(session.batches(Millions(), global_batch_size=128, epochs=1))
        assert len(batch.x) == 128
        took_s = time.process_time() - began_s
    print(f"the first batch cost {took_s:.2f} s")
    assert Millions.fetched == 128
    assert took_s < 10.0  # of this process alone, whoever else computes: 0.5 s
