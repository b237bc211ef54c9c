"""The digits task: shifts that follow from the sample alone, exact metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.jobs.config import JobConfig, load_job
from elastic_trainer.jobs.mnist import Mnist, MnistModel, network, scrambled, shifted


def _image() -> torch.Tensor:
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 10:18, 12:16] = 200
    return image


def _corner(image: torch.Tensor) -> tuple[int, int]:
    rows, columns = torch.nonzero(image[0], as_tuple=True)
    return int(rows.min()) - 10, int(columns.min()) - 12


def test_a_shift_moves_the_whole_image_within_its_limit() -> None:
    """Nothing is lost, every move within the limit occurs, and none beyond it."""
    images = _image().repeat(500, 1, 1, 1)
    moved = shifted(images, torch.arange(500), 2, seed=0, epoch=0)
    assert moved.dtype is torch.uint8
    assert (moved.sum(dim=(1, 2, 3)) == images.sum(dim=(1, 2, 3))).all()
    moves = {_corner(image) for image in moved}
    assert moves == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}


def test_a_shift_depends_on_seed_epoch_and_sample_alone() -> None:
    numbers = torch.arange(64)
    images = _image().repeat(64, 1, 1, 1)
    whole = shifted(images, numbers, 2, seed=3, epoch=5)
    parts = [shifted(images[i : i + 7], numbers[i : i + 7], 2, seed=3, epoch=5) for i in range(0, 64, 7)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(shifted(images, numbers, 2, seed=3, epoch=6), whole)
    assert not torch.equal(shifted(images, numbers, 2, seed=4, epoch=5), whole)
    assert torch.equal(shifted(images, numbers, 0, seed=3, epoch=5), images)


def test_scrambled_numbers_are_spread_evenly() -> None:
    """Neighbouring samples get unrelated numbers: each remainder occurs about equally often."""
    counts = torch.bincount(scrambled(torch.arange(25_000)) % 25)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_the_network_has_the_asked_size() -> None:
    small, large = (network(MnistModel(width=width)) for width in (4, 8))
    assert small(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in large.parameters())


def test_metrics_are_sums_and_counts_that_add_up() -> None:
    """The metrics of two parts add up to those of the whole, which are those computed by hand."""
    task = Mnist(load_job("mnist", ["data.limit=10"]))
    torch.manual_seed(0)
    data, model = task.datasets(), task.model().eval()
    fetch = Fetcher(data.test, torch.device("cpu"))
    ids = np.arange(30)
    with torch.no_grad():
        whole, *parts = (task.metrics(model, Batch(fetch, part, part, weight=1.0)) for part in (ids, ids[:7], ids[7:]))
    for name in ("accuracy", "loss"):
        assert sum(int(part[name][1]) for part in parts) == whole[name][1] == 30
        assert float(sum(part[name][0] for part in parts)) == pytest.approx(float(whole[name][0]))
    images, labels = data.test[:30][:2]  # type: ignore[index]
    with torch.no_grad():
        guesses = model((images.float() / 255 - 0.1307) / 0.3081).argmax(1)
    assert int(whole["accuracy"][0]) == int((guesses == labels).sum())


def test_training_data_can_be_limited_but_not_test_data() -> None:
    config = JobConfig.model_validate({"task": "mnist", "epochs": 1, "global_batch": 8, "data": {"limit": 20}})
    data = Mnist(config).datasets()
    assert (len(data.train), len(data.test)) == (20, 1000)
