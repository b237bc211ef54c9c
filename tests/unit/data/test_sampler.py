"""Drawing a rank's part of a batch from different kinds of data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Batch, Fetcher, Sampler
from elastic_trainer.data.sources import checked_length
from elastic_trainer.data.workers import placed, versions
from elastic_trainer.errors import DataError
from elastic_trainer.model import Cursor

CPU = torch.device("cpu")


class Pairs(Dataset[Any]):
    """Samples (i, -i)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), -index


class Many(Pairs):
    """The same, several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        return [self[index] for index in indices]


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(10.0), -torch.arange(10))


@pytest.mark.parametrize("dataset", [Pairs(), Many(), tensors()], ids=["getitem", "getitems", "tensors"])
def test_all_kinds_of_data_set_give_the_same_batches(dataset: Any) -> None:
    plan = EpochPlan(10, 6, seed=1)
    batch = Sampler(Fetcher(dataset, CPU), plan).draw(Cursor(0, 0), 1, 2)
    assert batch.ids.tolist() == plan.order(0)[3:6].tolist()
    assert batch.x.tolist() == [float(i) for i in batch.ids]
    assert batch.y.tolist() == [-int(i) for i in batch.ids]
    assert (len(batch), batch.weight, batch.global_size, batch.following) == (3, 1.0, 6, Cursor(0, 6))


def test_micro_batches_together_are_the_whole_batch() -> None:
    """The parts of a rank have the samples of its batch in order, and weights that add up to the batch's."""
    batch = Sampler(Fetcher(tensors(), CPU), EpochPlan(10, 10, 3)).draw(Cursor(), 0, 2)
    assert [len(part) for part in batch.micro_batches] == [3, 3]
    assert np.concatenate([part.ids for part in batch.micro_batches]).tolist() == batch.ids.tolist()
    assert sum(part.weight for part in batch.micro_batches) == pytest.approx(batch.weight)
    assert torch.equal(torch.cat([part.x for part in batch.micro_batches]), batch.x)


def test_a_rank_without_work_gets_data_but_no_samples_that_count() -> None:
    """A filler has data to compute on, weight 0 and no ids."""
    batch = Sampler(Fetcher(tensors(), CPU), EpochPlan(10, 4, 4)).draw(Cursor(), 1, 2)
    assert (len(batch.x), batch.weight, batch.ids.tolist()) == (4, 0.0, [])
    assert batch.micro_batches == (batch,)


def test_data_are_fetched_when_asked_for_and_once() -> None:
    """Micro-batches that are not looked at cost no loading; released ones are fetched again."""
    asked: list[int] = []

    class Counting(Pairs):
        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return super().__getitem__(index)

    batch = Sampler(Fetcher(Counting(), CPU), EpochPlan(10, 4, 2, shuffle=False)).draw(Cursor(), 0, 1)
    assert not asked
    first = batch.micro_batches[0]
    assert (first.x.tolist(), first.y.tolist(), asked) == ([0.0, 1.0], [0, -1], [0, 1])
    first.release()
    assert (first.x.tolist(), asked) == ([0.0, 1.0], [0, 1, 0, 1])


class Shifted(TensorDataset):
    """Not the rows themselves."""

    def __getitem__(self, index: Any) -> Any:
        return (self.tensors[0][index] + 100,)


def test_a_tensor_dataset_with_samples_of_its_own_is_asked_for_them() -> None:
    assert Fetcher(Shifted(torch.arange(3)), CPU)(np.array([2, 0])).data[0].tolist() == [102, 100]


def test_a_collate_function_of_ones_own_is_used() -> None:
    """Also for a TensorDataset, whose samples it then gets one by one."""
    batch = Batch(Fetcher(tensors(), CPU, collate=lambda samples: {"n": len(samples)}), np.arange(3), np.arange(3))
    assert batch.data == {"n": 3}
    assert batch.x == {"n": 3}
    with pytest.raises(DataError, match="no second part"):
        _ = batch.y


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [(Stream(), "read_from"), (Unsized(), "map-style"), (42, "map-style"), ([], "empty"), (iter([1]), "map-style")],
)
def test_a_data_set_that_cannot_be_planned_is_refused(dataset: Any, says: str) -> None:
    """One sentence says what it lacks."""
    with pytest.raises(DataError, match=says):
        checked_length(dataset)


def test_nested_data_keep_their_structure_on_the_way_to_the_device() -> None:
    """Dicts, lists, tuples and named tuples come out as they are; other things pass through."""

    class Sample(NamedTuple):
        a: torch.Tensor
        b: str

    data = {"s": Sample(torch.ones(1), "x"), "l": [torch.zeros(2), 3], "t": (b"raw", None)}
    moved = placed(data, torch.device("meta"))
    assert isinstance(moved["s"], Sample)
    assert moved["s"].a.device.type == moved["l"][0].device.type == "meta"
    assert (moved["s"].b, moved["l"][1], moved["t"]) == ("x", 3, (b"raw", None))


def test_data_that_were_changed_in_place_are_known() -> None:
    """By the tensors' own counts, also through views; what leaves no trace is never taken for untouched."""
    data = {"x": [torch.zeros(3), torch.ones(2)], "name": "a", "n": 3}
    before = versions(data)
    assert before is not None
    assert versions(data) == before
    data["x"][1][:1].add_(1)  # type: ignore[index]
    assert versions(data) != before
    assert versions([np.zeros(2)]) is None
