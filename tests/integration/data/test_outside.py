"""Sessions whose samples come from a DataLoader of the script's own, from streams with a state, or from workers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from elastic_trainer import Session, Streams
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.integrations.torchdata import StatefulDataLoader, streams
from elastic_trainer.model import Cursor
from tests.integration.data.datasets import Holed, Words


class Part(IterableDataset[Any]):
    def __init__(self, shard: int, shards: int, length: int = 10) -> None:
        self.shard, self.read, self.length = shard, 0, length

    def __iter__(self) -> Iterator[Any]:
        while self.read < self.length:
            self.read += 1
            yield torch.tensor([100.0 * self.shard + self.read - 1])

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Stateless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10.0).view(10, 1))


def wrapped(session: Session) -> tuple[Any, torch.optim.Optimizer]:
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    return session.wrap(module, optimizer=optimizer), optimizer


def trained(session: Session, model: Any, optimizer: Any, batches: Iterator[Any], leave_at: int = 0) -> list[float]:
    """What committed steps have used; every third batch is left for later, and comes again."""
    seen: list[float] = []
    for count, _ in enumerate(batches, 1):
        if count % 3 == 0:
            continue
        with session.step() as step:
            for part in step.micro_batches():
                seen += part.x.flatten().tolist()
                step.backward(model(part.x).mean())
            optimizer.step()
        if session.step_number == leave_at:
            session.save(wait=True)
            break
    return seen


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_each_sample_is_used_once_however_far_the_loader_has_fetched(
    kind: Any, workers: dict[str, Any], tmp_path: Path
) -> None:
    """Batches come again, and the job is resumed in mid-epoch by another loader."""
    dataset, seen = TensorDataset(torch.arange(60.0).view(60, 1)), []
    for leave_at in (6, 0):
        with Session(tmp_path, seed=3, device="cpu", checkpoint_every_s=None) as session:
            model, optimizer = wrapped(session)
            sampler = session.sampler(dataset, global_batch_size=16, micro_batch_size=6)
            loader = kind(dataset, batch_sampler=sampler, **workers)
            assert len(loader) == 4
            seen.append(trained(session, model, optimizer, sampler.batches(loader, epochs=3), leave_at))
    assert len(seen[0]) == 60 + 32
    assert sorted(seen[0] + seen[1]) == sorted([*range(60)] * 3)
    assert seen[0][:60] != sorted(seen[0][:60])
    del loader
    assert not multiprocessing.active_children()


def numbered(shards: list[int]) -> Iterator[Any]:
    for shard in shards:
        for number in range(10):
            yield {"x": [100.0 * shard + number]}


def hugging_face(shard: int, shards: int) -> Any:
    """One stream of what Hugging Face's ``load_dataset(..., streaming=True)`` gives."""
    from datasets import IterableDataset as Streamed
    from datasets.distributed import split_dataset_by_node

    data = Streamed.from_generator(numbered, gen_kwargs={"shards": [*range(shards)]}).with_format("torch")
    return split_dataset_by_node(data, rank=shard, world_size=shards)


def put_together(samples: Any) -> torch.Tensor:
    return torch.stack([sample["x"] if isinstance(sample, dict) else sample for sample in samples])


@pytest.mark.parametrize("part", [Part, hugging_face])
@pytest.mark.parametrize("kind", [Streams, streams])
def test_streams_are_resumed_where_committed_steps_have_left_them(kind: Any, part: Any, tmp_path: Path) -> None:
    """They wrap at their end; a second life begins from the last states, and reads on from there."""
    seen = []
    for leave_at in (7, 0):
        with Session(tmp_path, seed=3, device="cpu", checkpoint_every_s=None) as session:
            model, optimizer = wrapped(session)
            data, sizes = kind(part, 2, state_every=3), dict[str, Any](global_batch_size=4, micro_batch_size=2)
            batches = session.batches(data, **sizes, shuffle=False, steps=12, collate=put_together)
            assert data.state_dict()["exchanged"] == (0 if leave_at else 6)
            if part is hugging_face:
                assert ("shard_example_idx" in str(data.state_dict())) == (leave_at == 0), "not by its own state"
            seen += trained(session, model, optimizer, batches, leave_at)
        assert not multiprocessing.active_children()
    assert seen == [100.0 * shard + (2 * step + each) % 10 for step in range(12) for shard in (0, 1) for each in (0, 1)]


def test_a_stream_is_read_on_from_its_last_state_and_not_from_its_beginning() -> None:
    data, other = Streams(Part, 2), Streams(Part, 2)
    for each in (data, other):
        each.begin(4)
    assert [float(sample) for sample, _ in zip(data.read_from(0, 0), range(8), strict=False)][-1] == 103.0
    assert data.mine(4) == {}  # ahead of what is committed
    data.exchanged(2, [data.mine(8)])
    other.load_state_dict(data.state_dict())
    made = other._open[0]
    assert float(next(other.read_from(0, 12))) == 6.0
    assert made._source.read == made.read == 7
    assert [shard for shard, _ in map(other.place, range(4))] == [0, 0, 1, 1]


PLAIN = TensorDataset(torch.arange(20.0).view(20, 1))


def drawn(session: Session, data: Any, size: int = 4, **options: Any) -> Any:
    return next(session.batches(data, global_batch_size=size, **{"shuffle": False, "steps": 2, **options})).data


def looped(session: Session, dataset: Any = PLAIN, **options: Any) -> Any:
    sampler = session.sampler(PLAIN, global_batch_size=4)
    return sampler.batches(DataLoader(dataset, **{"batch_sampler": sampler, **options}), epochs=1)


@pytest.mark.parametrize(
    ("sentence", "act"),
    [
        ("does not draw by this sampler", lambda session: looped(session, batch_sampler=None, batch_size=2)),
        ("reads another data set", lambda session: looped(session, TensorDataset(torch.ones(20, 1)))),
        ("gives batches in any order", lambda session: looped(session, in_order=False)),
        (
            "is looped over itself",
            lambda session: next(iter(DataLoader(PLAIN, batch_sampler=session.sampler(PLAIN, global_batch_size=4)))),
        ),
        ("is a stream, whose samples have no", lambda session: session.sampler(Streams(Part, 2), global_batch_size=4)),
        ("is a Stateless, which does not keep", lambda session: drawn(session, Streams(lambda *_: Stateless(), 2))),
        ("of 5 samples cannot be divided among 2", lambda session: drawn(session, Streams(Part, 2), 5)),
        ("cannot be shuffled from outside", lambda session: drawn(session, Streams(Part, 2), shuffle=True)),
        ("streams have no end", lambda session: drawn(session, Streams(Part, 2), steps=None, epochs=2)),
        ("workers does not go with Streams", lambda session: drawn(session, Streams(Part, 2), workers=1)),
        ("is a TensorDataset, which is not", lambda session: drawn(session, streams(lambda *_: PLAIN, 2))),
        ("stream 0 of 2 has no samples", lambda session: drawn(session, Streams(partial(Part, length=0), 2))),
        ("shards=0", lambda session: Streams(Part, 0)),
        ("shuffle=False", lambda session: drawn(session, Words(), shuffle=True)),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_could_not_be_exact_is_refused_in_a_sentence(sentence: str, act: Callable[[Session], Any]) -> None:
    with Session(seed=3, device="cpu") as session:
        wrapped(session)
        with pytest.raises(DataError if "no samples" in sentence else ConfigError, match=sentence):
            act(session)


def test_an_error_of_a_stream_does_not_pass_for_its_end() -> None:
    class Failing(Part):
        def __iter__(self) -> Iterator[Any]:
            yield torch.zeros(1)
            raise ValueError("broken record")

    data = Streams(Failing, 1)
    data.begin(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken record"):
            list(zip(data.read_from(0, 0), range(2), strict=False))


# ---- data worker processes


class Augmented(Dataset[Any]):
    """Pairs with noise that is drawn anew in each epoch."""

    def __init__(self, length: int = 60) -> None:
        self.x = torch.randn(length, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(4), self.x[index].sum().view(1)


def trained_on(directory: Path | None, *, stop_at: int | None = None, epochs: int = 3, **options: Any) -> torch.Tensor:
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
    whole = trained_on(None)
    trained_on(tmp_path, stop_at=6, workers=2, prefetch=3)
    assert not multiprocessing.active_children()
    assert torch.equal(trained_on(tmp_path, workers=1), whole)
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


@pytest.mark.parametrize("workers", [0, 1])
def test_the_gradient_with_bad_samples_is_the_planned_mean_over_those_present(workers: int) -> None:
    """The sum over the 13 samples that are there, divided by the 16 of the plan; they are counted."""
    with Session(device="cpu") as session:
        model, optimizer = wrapped(session)
        for batch in session.batches(
            Holed(16), global_batch_size=16, micro_batch_size=8, epochs=1, workers=workers, bad_samples="skip"
        ):
            with session.step() as step:
                for part in step.micro_batches(batch):
                    step.backward(model(part.x.view(-1, 1)).mean())
                (gradient,) = (p.grad for name, p in model.named_parameters() if name.endswith("weight"))
                optimizer.step()
            assert gradient is not None
            assert float(gradient) == pytest.approx(sum(i for i in range(16) if i not in (1, 2, 3)) / 16)
            assert sorted(batch.ids.tolist()) == [0, *range(4, 16)]
        assert session.skipped_samples == 3


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
        wrapped(session)
        session._position.cursor = Cursor(0, 128 * 40_000)
        session._position.step = 40_000
        session.save()
    with Session(tmp_path, device="cpu") as session:
        wrapped(session)
        assert session.cursor == Cursor(0, 128 * 40_000)
        began_s = time.process_time()
        batch = next(session.batches(Millions(), global_batch_size=128, epochs=1))
        assert len(batch.x) == 128
        took_s = time.process_time() - began_s
    print(f"the first batch cost {took_s:.2f} s")
    assert Millions.fetched == 128
    assert took_s < 10.0  # of this process alone, whoever else computes: 0.5 s
