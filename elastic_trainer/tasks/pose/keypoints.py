"""Key points of all things in a picture at once, from a multi-resolution network; out of the box, those of digits.

Bottom-up: heat maps say where points are, tags which of them belong together. Nothing here knows of ranks or devices.
The names of the points belong to the identity of the run, since the network knows them by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from torch import Tensor, nn

from elastic_trainer.data.sampler import Batch
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.tasks.pose.coco import CocoScenes
from elastic_trainer.tasks.pose.digit_scenes import DigitScenes
from elastic_trainer.tasks.pose.drawing import drawn_points
from elastic_trainer.tasks.pose.heatmaps import heat_losses, tag_losses, targets
from elastic_trainer.tasks.pose.hrnet import HighResolutionNet, HrnetOptions
from elastic_trainer.tasks.pose.poses import Counts, Instance, find_peaks, grouped, judge
from elastic_trainer.tasks.pose.scenes import Moves, Scenes, Views
from elastic_trainer.tasks.vision.augmentation import normalized
from elastic_trainer.tasks.vision.digits import shipped_digits, split
from elastic_trainer.training.config import Section
from elastic_trainer.training.task import Datasets, Exhibits, Task

Colour = tuple[float, float, float]
Positive = Annotated[float, Field(gt=0.0)]

_SHOWN = 4


class CocoFiles(Section):
    """A COCO annotation file, and the directory of the images it names."""

    annotations: Path
    images: Path


class KeypointsData(Section):
    """``data:`` where the pictures are, and how they are seen. Without ``train`` and ``test``: the shipped digits."""

    train: CocoFiles | None = None
    test: CocoFiles | None = None
    category: str | None = Field(default=None, description="null: the only one of the file that has key points")
    empty: bool = Field(default=False, description="train also on pictures without any key point")
    count: int = Field(default=2000, ge=1, description="pictures with digits to train on")
    test_count: int = Field(default=300, ge=1)
    size: int = Field(default=64, ge=16, description="pixels that the network sees in each direction")
    most: int = Field(default=30, ge=1, description="instances in a picture; of more the smallest are left out")
    scale: tuple[Positive, Positive] = (1.0, 1.0)
    rotation: float = Field(default=0.0, ge=0.0, le=180.0, description="degrees, either way")
    shift: float = Field(default=0.0, ge=0.0, le=1.0, description="of the side, in each direction")
    flip: float = Field(default=0.0, ge=0.0, le=1.0, description="how often pictures are mirrored")
    mean: Colour = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _consistent(self) -> KeypointsData:
        if (self.train is None) != (self.test is None):
            raise ValueError("'train' and 'test' go together")
        if self.scale[0] > self.scale[1]:
            raise ValueError("'scale' is a least and a most")
        return self


class KeypointsOptions(Section):
    """``options:`` of the losses, of what counts as a peak, and of what counts as met."""

    sigma: float = Field(default=2.0, gt=0.0, description="of the Gaussians, in cells of the heat map")
    heat_weight: float = Field(default=1.0, gt=0.0)
    pull_weight: float = Field(default=1e-3, ge=0.0, description="tags of one instance alike")
    push_weight: float = Field(default=1e-3, ge=0.0, description="tags of two instances apart")
    threshold: float = Field(default=0.1, gt=0.0, lt=1.0, description="of a peak in the heat map")
    closeness: float = Field(default=1.0, gt=0.0, description="of tags of one instance")
    least_points: int = Field(default=2, ge=1, description="of an instance; smaller ones are noise")
    within: float = Field(default=0.15, gt=0.0, description="a point is met so near, in sizes of its instance")


class Keypoints(Task):
    """Bottom-up key points."""

    Data = KeypointsData
    Model = HrnetOptions
    Options = KeypointsOptions

    def datasets(self) -> Datasets:
        options: KeypointsData = self.data_options
        train, test = scenes(options)
        self.names: Sequence[str] = train.names
        check_size(options.size, self.model_options)
        how: dict[str, Any] = {"size": options.size, "stride": self.model_options.stride, "most": options.most}
        moves = Moves(options.scale, options.rotation, options.shift, options.flip)
        return Datasets(train=Views(train, **how, moves=moves), test=Views(test, **how))

    def identity(self) -> Mapping[str, Any]:
        return {"points": self.names}

    def model(self) -> nn.Module:
        return HighResolutionNet(len(self.names), self.model_options)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(*self._maps(model, batch), batch)["loss"].mean()

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Any, Any]]:
        heat, tags = self._maps(model, batch)
        losses = self._losses(heat, tags, batch)
        counts = Counts()
        _, points, sizes, _ = (part.cpu().double().numpy() for part in batch.data)
        for number, instances in enumerate(self._instances(heat, tags, batch)):
            present = (points[number, :, :, 2] > 0).any(axis=1)
            judge(instances, points[number, present], sizes[number, present], self.options.within, counts)
        sums = {name: (each.sum(), len(each)) for name, each in losses.items()}
        return {**sums, **counts.ratios()}

    def exhibits(self, model: nn.Module, batch: Batch) -> Exhibits:
        heat, tags = self._maps(model, batch)
        images, points, _, _ = (part.cpu() for part in batch.data)
        found = self._instances(heat, tags, batch)
        shown = range(min(_SHOWN, len(images)))
        return Exhibits(images={f"test {n}": drawn_points(images[n], points[n], found[n]) for n in shown})

    def _maps(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Heat maps and tags, (n, k, h, w) each."""
        heat, tags = model(normalized(batch.x, self.data_options.mean, self.data_options.std))
        return heat.float(), tags.float()

    def _losses(self, heat: Tensor, tags: Tensor, batch: Batch) -> dict[str, Tensor]:
        """By name, (n,): of each picture."""
        options: KeypointsOptions = self.options
        _, points, _, known = batch.data
        stride = self.model_options.stride
        wanted = targets(points, (heat.shape[2], heat.shape[3]), stride, options.sigma)
        heat_loss = heat_losses(heat, wanted, known.float())
        pull, push = tag_losses(tags, points, stride)
        whole = options.heat_weight * heat_loss + options.pull_weight * pull + options.push_weight * push
        return {"loss": whole, "heat_loss": heat_loss, "ae_loss": pull + push}

    def _instances(self, heat: Tensor, tags: Tensor, batch: Batch) -> list[list[Instance]]:
        """The instances found in each picture, outside of what is unknown."""
        options: KeypointsOptions = self.options
        visible = heat.detach() * batch.data[3][:, None]
        stride, most = self.model_options.stride, self.data_options.most
        peaks = find_peaks(visible, tags.detach(), stride, threshold=options.threshold, most=most)
        return [grouped(each, options.closeness, options.least_points) for each in peaks]


def scenes(options: KeypointsData) -> tuple[Scenes, Scenes]:
    """Pictures to train on and to test with: COCO's, or made of different digits."""
    if options.train is not None and options.test is not None:
        train = CocoScenes(**dict(options.train), category=options.category, empty=options.empty)
        test = CocoScenes(**dict(options.test), category=options.category)
        check_same_points(options.test.annotations, train.names, test.names)
        return train, test
    ours, others = split(shipped_digits(), test_size=1000, seed=0)
    return DigitScenes(ours, options.count, seed=0), DigitScenes(others, options.test_count, seed=1)


def check_same_points(path: Path, train: Sequence[str], test: Sequence[str]) -> None:
    """Raise DataError unless both name the same points in the same order."""
    if list(train) != list(test):
        raise DataError(
            f"{path}: its key points are {', '.join(test)}, those of the training data {', '.join(train)}",
            hint="both files need the same category",
        )


def check_size(size: int, model: HrnetOptions) -> None:
    """Raise ConfigError unless each branch halves ``size`` evenly."""
    least = model.stride * 2 ** (len(model.channels) - 1)
    if size % least:
        raise ConfigError(
            f"data.size {size} is not a multiple of {least}, which the network's branches need",
            hint=f"set data.size to {max(1, round(size / least)) * least}",
        )
