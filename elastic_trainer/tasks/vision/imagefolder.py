"""A residual network that classifies the images of class folders; out of the box, handwritten digits as PNG files.

Nothing here knows of ranks or devices. The classes are the names of the folders; they belong to the identity of the
run, since the network knows them by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import DataError
from elastic_trainer.tasks.vision.augmentation import CentralView, RandomView, normalized
from elastic_trainer.tasks.vision.digit_images import digit_images
from elastic_trainer.tasks.vision.image_files import ImageFolder, check_same_classes, image_files
from elastic_trainer.tasks.vision.resnet import ResNet, ResNetOptions
from elastic_trainer.training.config import Section
from elastic_trainer.training.optimization import build_optimizer, decay_groups
from elastic_trainer.training.task import Datasets, Task

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Ratio = Annotated[float, Field(gt=0.0)]
Jitter = Annotated[float, Field(ge=0.0)]
Spread = Annotated[float, Field(gt=0.0)]


class ImageFolderData(Section):
    """``data:`` where the images are, and how they are seen."""

    directory: Path | None = Field(default=None, description="has train/ and val/ or test/; null: the shipped digits")
    train: Path | None = Field(default=None, description="instead of directory: the class folders to train on")
    test: Path | None = None
    cache: Path | None = Field(default=None, description="where the digits are written; null: ~/.cache")
    limit: int | None = Field(default=None, ge=1, description="train on N samples only, evenly spread")
    size: int = Field(default=224, ge=8, description="pixels that the network sees in each direction")
    resize: int = Field(default=256, ge=8, description="of the shorter side in tests, before the middle is cut out")
    scale: tuple[Share, Share] = Field(default=(0.08, 1.0), description="part of the area that training sees")
    ratio: tuple[Ratio, Ratio] = (3 / 4, 4 / 3)
    flip: float = Field(default=0.5, ge=0.0, le=1.0, description="how often training images are mirrored")
    jitter: tuple[Jitter, Jitter, Jitter] = Field(
        default=(0.0, 0.0, 0.0), description="of brightness, contrast and saturation"
    )
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Spread, Spread, Spread] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _consistent(self) -> ImageFolderData:
        if (self.train is None) != (self.test is None):
            raise ValueError("'train' and 'test' go together")
        if self.directory is not None and self.train is not None:
            raise ValueError("either 'directory' or 'train' and 'test'")
        if self.scale[0] > self.scale[1] or self.ratio[0] > self.ratio[1]:
            raise ValueError("'scale' and 'ratio' are a least and a most")
        if self.resize < self.size:
            raise ValueError(f"'resize' {self.resize} is below 'size' {self.size}")
        return self


class ImageFolderOptions(Section):
    """``options:`` of the training."""

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    decay_all: bool = Field(default=False, description="weight decay of biases and norms too")
    top: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 5), min_length=1, description="metrics top1, top5, ...: the class is among the K best guesses"
    )


class ImageClasses(Task):
    """Images in class folders."""

    Data = ImageFolderData
    Model = ResNetOptions
    Options = ImageFolderOptions

    def datasets(self) -> Datasets:
        options: ImageFolderData = self.data_options
        train, test = (image_files(directory) for directory in directories(options))
        check_same_classes(train, test)
        self.classes = train.classes
        random_view = RandomView(options.size, options.scale, options.ratio, options.flip, options.jitter)
        return Datasets(
            train=ImageFolder(train.thinned(options.limit), random_view, deterministic=False),
            test=ImageFolder(test, CentralView(options.size, options.resize), deterministic=True),
        )

    def identity(self) -> Mapping[str, Any]:
        return {"classes": self.classes}

    def model(self) -> nn.Module:
        return ResNet(len(self.classes), self.model_options)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.options.decay_all:
            return super().optimizer(model)
        return build_optimizer(self.config.optimizer, decay_groups(model.parameters()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        scores, labels = self._scored(model, batch)
        return functional.cross_entropy(scores, labels, label_smoothing=self.options.label_smoothing)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        scores, labels = self._scored(model, batch)
        losses = functional.cross_entropy(scores, labels, reduction="none")
        among = {f"top{k}": hits_among(scores, labels, k) for k in self.options.top if k <= scores.shape[1]}
        return {name: (total, len(labels)) for name, total in {**among, "loss": losses.sum()}.items()}

    def _scored(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores of (n, classes) and labels of (n,)."""
        images = normalized(batch.x, self.data_options.mean, self.data_options.std)
        return model(images).float(), batch.y


def directories(options: ImageFolderData) -> tuple[Path, Path]:
    """Where the class folders for training and for testing are."""
    if options.train is not None and options.test is not None:
        return options.train, options.test
    root = options.directory if options.directory is not None else digit_images(options.cache)
    for name in ("val", "test"):
        if (root / name).is_dir():
            return root / "train", root / name
    what = "has neither val/ nor test/" if root.is_dir() else "there is no such directory"
    raise DataError(f"{root}: {what}", hint="data.directory must hold train/ and val/ or test/ with class folders")


def hits_among(scores: Tensor, labels: Tensor, count: int) -> Tensor:
    """How many of the (n,) ``labels`` are among the ``count`` best of (n, classes) ``scores``."""
    return (scores.topk(count, dim=1).indices == labels[:, None]).sum()
