"""Reading samples: keyed random numbers, streams, bad samples; a rank's part of a batch from any kind of data set."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from elastic_trainer.data.plan import EpochPlan, SampleRequest
from elastic_trainer.data.sampler import Batch, Fetcher, Sampler
from elastic_trainer.data.seeds import SEEDED, SampleSeeds, seed_host, undisturbed
from elastic_trainer.data.sources import (
    LEAST_LIMIT,
    Missing,
    SeekableStream,
    Tally,
    checked_length,
    deterministic,
    generators,
    is_stream,
    limit,
)
from elastic_trainer.data.workers import Loading, SampleReader, placed, versions
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.model import Cursor
from tests.integration.data.datasets import Noisy

DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.standard_normal()),
    "torch": lambda: float(torch.randn(())),
}


def draws() -> dict[str, list[float]]:
    """Three numbers of each: of two that are made together, one is kept for the next time."""
    return {name: [draw() for _ in range(3)] for name, draw in DRAWS.items()}


@pytest.mark.parametrize("value", [0, 1, 2**32 - 1, 2**32 + 5, 2**63 + 1, 2**64 - 1])
def test_seeding_is_that_of_the_modules(value: int) -> None:
    """Whatever was drawn before, also half of a pair."""
    with undisturbed():
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        torch.manual_seed(value)
        wanted = draws()
        random.gauss(0.0, 1.0)
        np.random.standard_normal()
        seed_host(value)
        assert draws() == wanted


@pytest.mark.parametrize("name", SEEDED)
def test_one_generator_is_seeded_alone(name: str) -> None:
    with undisturbed():
        seed_host(1)
        wanted = draws()
        seed_host(1)
        seeds = SampleSeeds(7, [name])
        seeds.sample(2, 3)
        told = draws()
        assert {each for each in DRAWS if told[each] == wanted[each]} == set(DRAWS) - {name}
        seeds.sample(2, 3)
        assert DRAWS[name]() == told[name][0]


def test_samples_and_what_puts_them_together_have_streams_of_their_own() -> None:
    """By seed, epoch and number; the function that collates may draw from all generators."""
    with undisturbed():
        found = set()
        for seed in (7, 8):
            seeds = SampleSeeds(seed, ["random"])
            for epoch in (0, 1):
                for number in (0, 1):
                    seeds.sample(epoch, number)
                    found.add(random.random())
                    seeds.collate(epoch, number)
                    found.add(random.random())
        assert len(found) == 16
        seeds.collate(0, 0)
        first = draws()
        seeds.collate(0, 0)
        assert draws() == first


@pytest.mark.parametrize("name", SEEDED)
def test_generators_are_put_back_as_they_were_also_after_an_error(name: str) -> None:
    with undisturbed():
        seed_host(3)
        wanted = draws()
        seed_host(3)
        with pytest.raises(ZeroDivisionError), undisturbed([name]):
            draws()["random"].append(1 / 0)
        told = draws()
        assert {each for each in DRAWS if told[each] == wanted[each]} == {name}


CPU = torch.device("cpu")


class NoisyMany(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def request(*numbers: int, epoch: int = 0, position: int = 0) -> SampleRequest:
    return SampleRequest(epoch, position, np.array(numbers))


def drawn(dataset: Any, *numbers: int, epoch: int = 0) -> dict[int, tuple[float, ...]]:
    data = Fetcher(dataset, CPU, seed=7).draw(request(*numbers, epoch=epoch)).data
    return {int(row[0]): tuple(map(float, row[1:])) for row in zip(*data, strict=True)}


@pytest.mark.parametrize("dataset", [Noisy(), NoisyMany(), Subset(NoisyMany(), range(20))], ids=["one", "many", "sub"])
def test_the_augmentation_of_a_sample_depends_on_seed_epoch_and_number_alone(dataset: Any) -> None:
    """Whatever is drawn before it or with it, and whether the data set offers to give several at a time."""
    together, apart = drawn(dataset, 3, 4, 5), {**drawn(dataset, 5), **drawn(dataset, 4, 3)}
    assert together == apart
    assert len({number for values in together.values() for number in values}) == 9
    assert drawn(dataset, 3, epoch=1) != drawn(dataset, 3)


def test_drawing_leaves_the_generators_as_they_were() -> None:
    """A step that draws data goes on with random numbers of its own (dropout)."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    drawn(Noisy(), 1, 2)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


class Fixed(NoisyMany):
    deterministic = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return indices


def test_a_data_set_that_draws_no_random_numbers_is_asked_for_many_at_once() -> None:
    """It says so, or wraps one that does; nothing is seeded then."""
    dataset = Fixed()
    reader = SampleReader(dataset, None, seed=7)
    assert (reader.draws, deterministic(Subset(dataset, [0])), deterministic(Noisy())) == ((), True, False)
    assert reader.read(request(4, 2)).data.tolist() == [4, 2]
    assert dataset.asked == [[4, 2]]
    assert deterministic(TensorDataset(torch.ones(1)))


class OfPythons(Dataset[Any]):
    """Draws from python's generator alone, and says so."""

    generators = ("random",)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_a_data_set_may_name_the_generators_that_it_draws_from() -> None:
    """Those alone are seeded for a sample, and kept for what follows; the others go on as they were."""
    reader = SampleReader(OfPythons(), None, seed=7)
    assert (reader.draws, generators(Subset(OfPythons(), [0]))) == (("random",), ("random",))
    torch.manual_seed(1)
    first, again = (reader.read(request(3)).data for _ in range(2))
    assert float(first[0]) == float(again[0])
    assert float(first[2]) != float(again[2])
    collating = SampleReader(OfPythons(), list, seed=7)  # which may draw from all
    assert collating.draws == ("random", "numpy", "torch")


def test_only_generators_that_are_known_can_be_named() -> None:
    dataset = OfPythons()
    for wrong in ("random", ("jax",), 3, len, [torch.Generator()], [["random"]]):
        dataset.generators = wrong  # type: ignore[assignment]
        with pytest.raises(DataError, match=r"OfPythons\.generators is .*: unknown"):
            SampleReader(dataset, None, seed=7)


def test_a_collate_function_that_mixes_at_random_is_keyed_too() -> None:
    """By the first sample; what the samples have drawn does not matter."""

    def mixing(samples: list[Any]) -> float:
        return random.random()

    first, again = (SampleReader(Noisy(), mixing, seed=1).read(request(5, 6)).data for _ in range(2))
    assert first == again != SampleReader(Noisy(), mixing, seed=1).read(request(6, 5)).data


def test_set_epoch_is_called_once_for_each_epoch() -> None:
    class Knowing(Noisy):
        told: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    reader = SampleReader(Knowing(), None, seed=1)
    for epoch in (2, 2, 3):
        reader.read(request(1, epoch=epoch))
    assert Knowing.told == [2, 3]


# ---- streams


class Words:
    def __init__(self, length: int = 10, real: int | None = None) -> None:
        self.length, self.real = length, real if real is not None else length
        self.sought: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.length

    def read_from(self, epoch: int, position: int) -> Iterator[Any]:
        self.sought.append((epoch, position))
        for number in range(position, self.real):
            if number == 7 and epoch == 5:
                raise OSError("torn")
            yield 100 * epoch + number


def test_a_stream_is_read_in_its_own_order_and_sought_in_only_where_it_must() -> None:
    """Contiguous requests go on with the open iterator."""
    stream = Words()
    reader = SampleReader(stream, None, seed=1)
    assert reader.read(request(2, 3)).data.tolist() == [2, 3]
    assert reader.read(request(4, 5)).data.tolist() == [4, 5]
    assert reader.read(request(0, epoch=1)).data.tolist() == [100]
    assert stream.sought == [(0, 2), (1, 0)]
    assert isinstance(stream, SeekableStream)
    assert is_stream(stream)


def test_a_stream_that_is_shorter_than_it_says_is_an_error_also_where_bad_samples_are_skipped() -> None:
    """Skipping to its end would train on less data than the plan says."""
    with pytest.raises(DataError, match="of 10 samples ended before sample 4 of epoch 0"):
        SampleReader(Words(real=4), None, seed=1, skips=True).read(request(3, 4, 5))


def test_a_bad_sample_of_a_stream_is_passed_over() -> None:
    read = SampleReader(Words(), None, seed=1, skips=True).read(request(6, 7, 8, epoch=5))
    assert (read.data.tolist(), [each.number for each in read.missing]) == ([506, 508], [7])


# ---- bad samples


class Holed(Dataset[Any]):
    """Samples 1, 2, 3 and 11 raise."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index in (1, 2, 3, 11):
            raise ValueError(f"bad {index}")
        return torch.tensor(float(index))


class HoledMany(Holed):
    deterministic = True

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Holed(), HoledMany()], ids=["one", "many"])
def test_a_bad_sample_is_left_out_counted_and_weighs_nothing(dataset: Any) -> None:
    """The others keep the weight that they have in the planned global batch."""
    tally = Tally()
    source = Fetcher(dataset, CPU, seed=1, loading=Loading(bad_samples="skip"), tally=tally)
    batch = Sampler(source, EpochPlan(16, 8, 4, shuffle=False)).draw(Cursor(0, 8), 0, 2)
    part = batch.micro_batches[0]
    assert (part.weight, len(part), part.ids.tolist()) == (1.0, 4, [8, 9, 10, 11])
    assert part.data.tolist() == [8, 9, 10]
    assert (part.weight, len(part), part.ids.tolist()) == (0.75, 3, [8, 9, 10])
    assert (batch.ids.tolist(), tally.total) == ([8, 9, 10], 1)
    part.release()
    assert part.data.tolist() == [8, 9, 10]
    assert tally.total == 1


def test_by_default_a_bad_sample_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="bad 2") as caught:
        Fetcher(Holed(), CPU, seed=1).draw(request(0, 2))
    assert "sample 2, in epoch 0" in caught.value.__notes__[0]


def test_a_micro_batch_of_bad_samples_only_is_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match=r"all 3 raised: \[1, 2, 3\]; sample 1: ValueError: bad 1"):
        Fetcher(Holed(), CPU, seed=1, loading=Loading(bad_samples="skip")).draw(request(1, 2, 3))


def test_too_many_bad_samples_are_an_error() -> None:
    """A sample that is drawn again counts once; each epoch begins anew."""
    tally = Tally()
    for epoch in (0, 1):
        tally.add_missing(epoch, [Missing(1, "E"), Missing(1, "E"), Missing(2, "E")], most=2)
    assert tally.total == 4
    with pytest.raises(DataError, match="3 samples of epoch 1 could not be fetched here, and at most 2"):
        tally.add_missing(1, [Missing(3, "E")], most=2)


def test_the_limit_is_a_part_of_what_one_rank_sees_and_at_least_a_handful() -> None:
    """1 % of 100,000 samples on 4 ranks are 250 on each."""
    assert limit(100_000, 4, 0.01) == 250
    assert limit(100, 4, 0.01) == LEAST_LIMIT


def test_lines_about_bad_samples_become_fewer_but_never_end() -> None:
    """The first ten, then each time that the count has doubled."""
    with capture_logs() as logs:
        Tally().add_missing(0, [Missing(number, "E") for number in range(200)], most=200)
    assert [each["count"] for each in logs] == [*range(1, 11), 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"workers": -1}, "workers is -1"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"bad_samples": "drop"}, "bad_samples is 'drop'"),
        ({"max_bad_fraction": 2.0}, "max_bad_fraction is 2.0"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context is 'thread'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Loading(**options)


# ---- a rank's part of a batch


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), -index


class Many(Pairs):
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


class Iterated(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "says"),
    [(Iterated(), "read_from"), (Unsized(), "map-style"), (42, "map-style"), ([], "empty"), (iter([1]), "map-style")],
)
def test_a_data_set_that_cannot_be_planned_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        checked_length(dataset)


def test_nested_data_keep_their_structure_on_the_way_to_the_device() -> None:
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
