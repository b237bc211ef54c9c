"""What is seen of an image follows from the seed, stays inside of the image, and is a middle in tests."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.seeds import SampleSeeds
from elastic_trainer.jobs.images import CentralView, RandomView, as_bytes, jittered, normalized, random_box
from elastic_trainer.jobs.pillow import Image


def picture(width: int = 40, height: int = 30) -> Image.Image:
    """Noise, so that any two parts differ."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_a_sample_is_seen_alike_wherever_it_is_drawn_and_otherwise_in_another_epoch() -> None:
    view = RandomView(16, jitter=(0.4, 0.4, 0.4))
    seeds = SampleSeeds(3)

    def drawn(epoch: int, number: int) -> torch.Tensor:
        seeds.sample(epoch, number)
        return view(picture())

    first = drawn(1, 5)
    others = [drawn(1, 6), drawn(2, 5)]
    assert first.shape == (3, 16, 16)
    assert first.dtype is torch.uint8
    assert torch.equal(drawn(1, 5), first)
    assert not any(torch.equal(other, first) for other in others)


@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    least=st.floats(0.01, 1.0),
    ratio=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
)
def test_a_random_part_lies_within_the_image(width: int, height: int, least: float, ratio: float, seed: int) -> None:
    random.seed(seed)
    left, top, right, bottom = random_box(width, height, (least, 1.0), (ratio, 1 / ratio))
    assert 0 <= left < right <= width + 1e-9
    assert 0 <= top < bottom <= height + 1e-9


def test_flips_are_as_frequent_as_asked() -> None:
    whole = {"size": 30, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    square = picture(30, 30)
    plain = as_bytes(square)
    assert torch.equal(RandomView(**whole, flip=0.0)(square), plain)  # type: ignore[arg-type]
    assert torch.equal(RandomView(**whole, flip=1.0)(square), plain.flip(2))  # type: ignore[arg-type]


def test_jitter_changes_colours_only_where_asked() -> None:
    """None leaves the image itself; brightness moves by at most its part."""
    image = Image.new("RGB", (4, 4), (100, 100, 100))
    assert jittered(image, (0.0, 0.0, 0.0)) is image
    random.seed(0)
    seen = {int(as_bytes(jittered(image, (0.5, 0.0, 0.0))).max()) for _ in range(50)}
    assert min(seen) >= 50
    assert max(seen) <= 150
    assert len(seen) > 10


def test_tests_see_the_middle() -> None:
    """The shorter side becomes `resize`, and the square in the middle of it is cut out."""
    array = np.zeros((20, 40, 3), dtype=np.uint8)
    array[5:15, 15:25] = 255
    seen = CentralView(size=10, resize=20)(Image.fromarray(array))
    assert seen.shape == (3, 10, 10)
    assert int(seen.min()) == 255


def test_bytes_are_normalized_by_colour() -> None:
    """White is 1 before the mean is taken off."""
    image = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalized(image, (0.5, 0.5, 0.0), (0.5, 0.25, 0.1)).flatten().tolist() == pytest.approx([1.0, -2.0, 2.0])
