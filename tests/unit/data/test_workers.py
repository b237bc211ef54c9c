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
from elastic_trainer.data.seeds import SEEDED, STEP, SampleSeeds, key, seed_host, undisturbed
from elastic_trainer.data.sources import (
    LEAST_LIMIT,
    Missing,
    Tally,
    checked_length,
    deterministic,
    generators,
    key_of,
    limit,
)
from elastic_trainer.data.workers import Loading, SampleReader, placed, versions
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.model import Cursor
from tests.integration.data.datasets import Holed, Noisy

DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.standard_normal()),
    "torch": lambda: float(torch.randn(())),
}


def draws() -> dict[str, list[float]]:
    """Three numbers of each: of two that are made together, one is kept for the next time."""
    return {name: [draw() for _ in range(3)] for name, draw in DRAWS.items()}


def test_keys_differ_in_every_part_and_in_order() -> None:
    """Neighbouring seeds, steps and ranks share no key: a hundred thousand of them are all different."""
    keys = {key(STEP, seed, step, rank) for seed in range(10) for step in range(1000) for rank in range(10)}
    assert len(keys) == 100_000
    assert key(1, 2) != key(2, 1)
    bits = np.array([[key(7, step) >> bit & 1 for bit in range(64)] for step in range(2000)])
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06  # 5 sigma: each bit is set half the time


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
    with undisturbed():
        seed_host(3)
        wanted = draws()
        seed_host(3)
        drawn(Noisy(), 1, 2)
        assert draws() == wanted


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
    """Contiguous requests go on with the open iterator; behind a bad sample, which may be skipped, a new one begins.
    One that ends too early is an error all the same: skipping would train on less data than the plan says."""
    stream = Words()
    reader = SampleReader(stream, None, seed=1, skips=True)
    assert [reader.read(request(*numbers)).data.tolist() for numbers in ((2, 3), (4, 5))] == [[2, 3], [4, 5]]
    read = reader.read(request(6, 7, 8, epoch=5))
    assert (read.data.tolist(), [each.number for each in read.missing]) == ([506, 508], [7])
    assert stream.sought == [(0, 2), (5, 6), (5, 8)]
    with pytest.raises(DataError, match="of 10 samples ended before sample 4 of epoch 0"):
        SampleReader(Words(real=4), None, seed=1, skips=True).read(request(3, 4, 5))


# ---- bad samples


class HoledMany(Holed):
    deterministic = True

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Holed(), HoledMany()], ids=["one", "many"])
def test_a_bad_sample_is_left_out_counted_and_weighs_nothing(dataset: Any) -> None:
    """The others keep the weight that they have in the planned global batch."""
    tally = Tally()
    source = Fetcher(dataset, CPU, seed=1, loading=Loading(bad_samples="skip"), tally=tally)
    part = Sampler(source, EpochPlan(20, 8, 4, shuffle=False)).draw(Cursor(), 0, 2)
    assert (part.weight, len(part), part.ids.tolist()) == (1.0, 4, [0, 1, 2, 3])
    for _ in "ab":
        assert part.data.tolist() == [0]
        assert (part.weight, len(part), part.ids.tolist(), tally.total) == (0.25, 1, [0], 3)
        part.release()


def test_a_bad_sample_is_an_error_that_names_it_by_default_or_where_none_is_left() -> None:
    with pytest.raises(ValueError, match="bad 2") as caught:
        Fetcher(Holed(), CPU, seed=1).draw(request(0, 2))
    assert "sample 2, in epoch 0" in caught.value.__notes__[0]
    with pytest.raises(DataError, match=r"all 3 raised: \[1, 2, 3\]; sample 1: ValueError: bad 1"):
        Fetcher(Holed(), CPU, seed=1, loading=Loading(bad_samples="skip")).draw(request(1, 2, 3))


def test_too_many_bad_samples_are_an_error_and_not_each_has_a_line() -> None:
    """A sample that is drawn again counts once; each epoch begins anew. The first ten have a line, then each time that
    their number has doubled. 1 % of 100,000 samples on 4 ranks are 250 on each; a handful is always allowed."""
    tally = Tally()
    for epoch in (0, 1):
        tally.add_missing(epoch, [Missing(1, "E"), Missing(1, "E"), Missing(2, "E")], most=2)
    assert tally.total == 4
    with pytest.raises(DataError, match="3 samples of epoch 1 could not be fetched here, and at most 2"):
        tally.add_missing(1, [Missing(3, "E")], most=2)
    with capture_logs() as logs:
        Tally().add_missing(0, [Missing(number, "E") for number in range(200)], most=200)
    assert [each["count"] for each in logs] == [*range(1, 11), 16, 32, 64, 128]
    assert (limit(100_000, 4, 0.01), limit(100, 4, 0.01)) == (250, LEAST_LIMIT)


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


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(10.0), -torch.arange(10))


@pytest.mark.parametrize("dataset", [Pairs(), tensors()], ids=["getitem", "tensors"])
def test_all_kinds_of_data_set_give_the_same_batches(dataset: Any) -> None:
    plan = EpochPlan(10, 6, seed=1)
    batch = Sampler(Fetcher(dataset, CPU), plan).draw(Cursor(0, 0), 1, 2)
    assert batch.ids.tolist() == plan.order(0)[3:6].tolist()
    assert batch.x.tolist() == [float(i) for i in batch.ids]
    assert batch.y.tolist() == [-int(i) for i in batch.ids]
    assert (len(batch), batch.weight, batch.global_size, batch.following) == (3, 1.0, 6, Cursor(0, 6))


def test_micro_batches_together_are_the_whole_batch_and_a_filler_counts_for_nothing() -> None:
    """The parts of a rank have the samples of its batch in order, and weights that add up to the batch's. A rank
    without work gets data to compute on."""
    batch = Sampler(Fetcher(tensors(), CPU), EpochPlan(10, 10, 3)).draw(Cursor(), 0, 2)
    assert [len(part) for part in batch.micro_batches] == [3, 3]
    assert np.concatenate([part.ids for part in batch.micro_batches]).tolist() == batch.ids.tolist()
    assert sum(part.weight for part in batch.micro_batches) == pytest.approx(batch.weight)
    assert torch.equal(torch.cat([part.x for part in batch.micro_batches]), batch.x)
    filler = Sampler(Fetcher(tensors(), CPU), EpochPlan(10, 4, 4)).draw(Cursor(), 1, 2)
    assert (len(filler.x), filler.weight, filler.ids.tolist(), filler.micro_batches) == (4, 0.0, [], (filler,))


def test_data_are_fetched_when_asked_for_and_once() -> None:
    """Micro-batches that are not looked at cost no loading; released ones are fetched again."""
    dataset = Fixed()
    batch = Sampler(Fetcher(dataset, CPU), EpochPlan(20, 4, 2, shuffle=False)).draw(Cursor(), 0, 1)
    assert not dataset.asked
    first = batch.micro_batches[0]
    assert (first.x.tolist(), first.x.tolist(), dataset.asked) == ([0, 1], [0, 1], [[0, 1]])
    first.release()
    assert (first.x.tolist(), dataset.asked) == ([0, 1], [[0, 1], [0, 1]])


class Shifted(TensorDataset):
    """Not the rows themselves."""

    def __getitem__(self, index: Any) -> Any:
        return (self.tensors[0][index] + 100,)


def test_a_data_set_of_tensors_may_have_samples_or_a_collate_function_of_its_own() -> None:
    """Then it is asked for its samples one by one."""
    assert Fetcher(Shifted(torch.arange(3)), CPU)(np.array([2, 0])).data[0].tolist() == [102, 100]
    batch = Batch(Fetcher(tensors(), CPU, collate=lambda samples: {"n": len(samples)}), np.arange(3), np.arange(3))
    assert batch.data == batch.x == {"n": 3}
    with pytest.raises(DataError, match="no second part"):
        _ = batch.y


class Iterated(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class ByNumber(Iterated):
    """As the data sets of LitData and MosaicML's streaming are."""

    def __getitem__(self, index: int) -> int:
        return 10 * index


def test_a_stream_that_gives_samples_by_number_is_read_by_number() -> None:
    assert checked_length(ByNumber()) == 3
    assert Fetcher(ByNumber(), CPU)(np.array([2, 0])).data.tolist() == [20, 0]


class Named(Iterated):
    """Keys of its own."""

    def key(self, number: int) -> str:
        return f"sample-{number}"


class Folder(Iterated):
    """As torchvision's."""

    samples = (("cats/1.png", 0), ("dogs/2.png", 1), ("dogs/3.png", 1))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (Named(), ["sample-0", "sample-2"]),
        (Folder(), ["cats/1.png", "dogs/3.png"]),
        (Subset(Folder(), [2, 1, 0]), ["dogs/3.png", "cats/1.png"]),
        (Iterated(), None),
        (tensors(), None),
    ],
)
def test_a_data_set_may_name_its_samples(dataset: Any, named: list[str] | None) -> None:
    found = key_of(dataset)
    assert (None if found is None else [found(0), found(2)]) == named


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
