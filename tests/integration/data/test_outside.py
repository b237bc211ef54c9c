"""A session whose samples come from a DataLoader of the script's own, or from streams that keep their own state."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastic_trainer import Session, Streams
from elastic_trainer.errors import ConfigError, DataError, ElasticTrainerError
from elastic_trainer.integrations.torchdata import StatefulDataLoader, streams


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


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("other sampler", "does not draw by this sampler"),
        ("other data", "reads another data set"),
        ("alone", "is looped over itself"),
        ("unordered", "gives batches in any order"),
        ("stream", "is a stream, whose samples have no numbers"),
        ("no state", "is a Stateless, which does not keep where it is"),
        ("uneven", "a global batch of 5 samples cannot be divided among 2 streams"),
        ("shuffled", "cannot be shuffled from outside"),
        ("epochs", "streams have no end"),
        ("workers", "workers does not go with Streams"),
        ("empty", "stream 0 of 2 has no samples"),
        ("map-style", "is a TensorDataset, which is not an IterableDataset"),
        ("none", "shards=0"),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_what_could_not_be_exact_is_refused_in_a_sentence(fault: str, sentence: str) -> None:
    with Session(seed=3, device="cpu") as session, pytest.raises(ElasticTrainerError, match=sentence) as raised:
        go_wrong(session, fault)
    assert isinstance(raised.value, DataError if fault == "empty" else ConfigError)


def go_wrong(session: Session, fault: str) -> None:
    dataset = TensorDataset(torch.arange(20.0).view(20, 1))
    make: Any = {
        "no state": lambda *_: Stateless(),
        "empty": lambda shard, shards: Part(shard, shards, 0),
    }.get(fault, Part)
    options: dict[str, Any] = {"global_batch_size": 5 if fault == "uneven" else 4, "shuffle": fault == "shuffled"}
    wrapped(session)
    sampler = session.sampler(Streams(Part, 2) if fault == "stream" else dataset, global_batch_size=4)
    if fault == "none":
        Streams(Part, 0)
    elif fault == "other sampler":
        sampler.batches(DataLoader(dataset, batch_size=2), epochs=1)
    elif fault == "other data":
        sampler.batches(DataLoader(TensorDataset(torch.ones(20, 1)), batch_sampler=sampler), epochs=1)
    elif fault == "unordered":
        sampler.batches(DataLoader(dataset, batch_sampler=sampler, in_order=False), epochs=1)
    elif fault == "alone":
        next(iter(DataLoader(dataset, batch_sampler=sampler)))
    else:
        data = streams(lambda *_: dataset, 2) if fault == "map-style" else Streams(make, 2)
        options |= {"epochs": 2} if fault == "epochs" else {"steps": 2}
        options |= {"workers": 1} if fault == "workers" else {}
        _ = next(session.batches(data, **options)).data


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
