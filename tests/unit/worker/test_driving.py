"""A session that frameworks drive: what wrap returns, steps without a block, hidden ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from elastic_trainer.data.plan import Course, EpochPlan, Piece
from elastic_trainer.errors import ConfigError
from elastic_trainer.integrations.loading import SessionLoader
from elastic_trainer.model import Cursor
from elastic_trainer.worker.session import Session
from tests.unit.worker.toys import data, linear, loss_of


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.words = nn.Linear(4, 1), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def generate(self) -> int:
        return self.words


@pytest.mark.parametrize("compiled", [False, True])
def test_what_wrap_returns_has_all_that_the_bare_model_has(compiled: bool) -> None:
    """Methods, settings, mode, names of parameters: with torch.compile too, and so in checkpoints."""
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(device="cpu") as session:
        given: Any = torch.compile(model, backend="eager") if compiled else model
        wrapped = session.wrap(given, optimizer=optimizer)
        assert session.module is model
        assert wrapped.generate() == 2
        wrapped.words = 3
        assert model.generate() == 3
        wrapped.eval()
        assert not model.training
        assert not model.layer.training
        names = ["layer.weight", "layer.bias"]
        assert [*wrapped.state_dict()] == [name for name, _ in wrapped.named_parameters()] == names
        assert [*session._trained.collect()["model"]] == names
        assert isinstance(copy.deepcopy(wrapped), Speaker)
        assert wrapped(torch.ones(2, 4)).shape == (2, 1)


def test_steps_may_be_begun_and_ended_without_a_block() -> None:
    """One at a time, each with its update."""
    with Session(device="cpu") as session:
        _, wrapped = linear(session)
        for batch in session.batches(data(), global_batch_size=20, epochs=1):
            step = session.begin_step()
            with pytest.raises(ConfigError, match="before the end of the last step"):
                session.begin_step()
            step.backward(loss_of(wrapped, batch))
            step.update()
            assert step.end()
        assert session.step_number == 3
        batch = next(session.batches(data(), global_batch_size=20, epochs=2))
        step = session.begin_step()
        step.backward(loss_of(wrapped, batch))
        with pytest.raises(ConfigError, match=r"ended without optimizer.step\(\)"):
            step.end()


@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_may_be_skipped_on_purpose(scaled: bool) -> None:
    """The parameters stay, the data is used, and a loss that is not a number is forgiven."""
    with Session(device="cpu") as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
        optimizer, wrapped = linear(session, scaler=scaler)
        batches = session.batches(data(), global_batch_size=20, epochs=1)
        for number, batch in enumerate(batches):
            before = wrapped.weight.detach().clone()
            with session.step() as step:
                step.backward(loss_of(wrapped, batch) * (float("nan") if number == 1 else 1.0))
                step.clip(1.0)
                if number == 1:
                    step.skip()
                else:
                    optimizer.step()
            assert step.committed
            assert torch.equal(before, wrapped.weight) == (number == 1)
        assert (session.step_number, session.cursor) == (3, Cursor(1, 0))
        assert not session._trained.steps.nonfinite()


def pl_worker_init_function(worker: int, rank: int) -> None:
    """As Lightning's, which it gives each DataLoader after seed_everything(workers=True)."""


NUMBERS = TensorDataset(torch.arange(22.0).view(22, 1))


@pytest.mark.parametrize(
    ("told", "sizes"),
    [
        ({"batch_size": 4, "drop_last": True}, [8, 8, 4]),
        ({"batch_size": 4, "worker_init_fn": partial(pl_worker_init_function, rank=0)}, [8, 8, 6]),
        ({"batch_sampler": BatchSampler(RandomSampler(NUMBERS), 5, drop_last=True)}, [10, 10]),
    ],
)
def test_a_loader_is_cut_as_it_was_told(told: dict[str, Any], sizes: list[int]) -> None:
    """Two batches a step; an epoch that has ended gives no batch and begins no step."""
    model = nn.Linear(1, 1)
    with Session(device="cpu") as session:
        session.wrap(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        loader, used = SessionLoader(session, DataLoader(NUMBERS, **told), passes=2), []
        assert len(loader) == len(sizes)
        for _ in range(2):
            for _ in loader:
                with session.step() as step:
                    used.append(session._here.feed.batch.global_size)  # type: ignore[union-attr]
                    step.skip()
        assert used == sizes * 2


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"sampler": DistributedSampler(NUMBERS, 2, 0)}, "DistributedSampler"),
        ({"sampler": RandomSampler(NUMBERS, replacement=True)}, "replacement"),
        ({"sampler": RandomSampler(NUMBERS, num_samples=4)}, "num_samples"),
        ({"sampler": RandomSampler(NUMBERS, generator=torch.Generator())}, "sampler with a generator"),
        ({"batch_sampler": [[0, 1], [2]], "batch_size": 1}, "a list"),
        ({"generator": torch.Generator()}, "a generator"),
        ({"worker_init_fn": print}, "worker_init_fn"),
        ({"timeout": 5, "num_workers": 1}, "timeout"),
        ({"batch_size": None, "sampler": SequentialSampler(NUMBERS)}, "batch_size"),
    ],
)
def test_what_a_loader_was_told_and_a_session_would_drop_is_refused_by_name(told: dict[str, Any], named: str) -> None:
    with Session(device="cpu") as session, pytest.raises(ConfigError, match=named):
        SessionLoader(session, DataLoader(NUMBERS, **{"batch_size": 2, **told}))


def test_a_part_that_memory_is_short_for_is_computed_in_halves() -> None:
    """Of the same samples with the same weight; where ranks need equally many passes, in equally many."""
    for world, passes, even in ((2, None, False), (3, 2, False), (2, 2, True)):
        plan = EpochPlan(length=21, global_batch=10, passes=passes, shuffle=False)
        whole = plan.global_batch_at(Cursor(0, 0))
        counts = set()
        for rank in range(world):
            before = Course(plan, rank, world, 1, even).pieces(whole)
            after = Course(plan, rank, world, 1, even, halvings=2).pieces(whole)
            counts.add(len(after))
            assert _places(before) == _places(after)
            assert max(piece.size for piece in after) <= -(-max(piece.size for piece in before) // 4)
            assert sum(piece.weight for piece in after) == pytest.approx(sum(piece.weight for piece in before))
        assert not even or len(counts) == 1


def _places(pieces: Iterable[Piece]) -> list[int]:
    return [place for piece in pieces if piece.counts for place in range(piece.start, piece.stop)]


def test_ranks_are_hidden_from_frameworks_until_the_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not from torch, nor from the session."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    real = dist.is_initialized
    called: list[int] = []
    with Session(device="cpu") as session:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        shown = dist.is_initialized
        session.hide_ranks()
        assert "RANK" not in os.environ
        assert not dist.is_initialized()
        assert eval("dist.is_initialized()", {"__name__": "torch.nn", "dist": dist})
        session.on_ranks_changed(lambda: called.append(session.rank))
        linear(session)
        assert session.is_rank0
        assert called == [0]
    assert dist.is_initialized is shown
    assert os.environ["RANK"] == "0"
    assert real is not shown
