"""The default generators are seeded as their modules would, in a fraction of the time."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from elastic_trainer.data.seeds import SEEDED, SampleSeeds, seed_host, undisturbed

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
