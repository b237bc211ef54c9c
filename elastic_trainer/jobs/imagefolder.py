"""A residual network that classifies the images of class folders; out of the box, handwritten digits as PNG files.

The network: He et al., "Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385. The
bottleneck strides in its 3x3 convolution (known as v1.5), and parameters are named as torchvision names them, so that
the weights it offers can be loaded. 18 and 50 layers have 11,689,512 and 25,557,032 parameters at 1,000 classes.

It sees a random part of an image, in a test its middle. Random numbers come from Python's generator, which the session
keys by (seed, epoch, sample): the same image looks the same on whatever rank it is drawn, and after a restart. The
classes are the names of the folders; they belong to the identity of the run, since the network knows them by number.

*Fails by* DataError for folders that hold no data set, SampleError for an image that cannot be read (StorageReadError
where that is the storage's fault).
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer import Batch
from elastic_trainer.errors import DataError, SampleError, StorageReadError
from elastic_trainer.jobs.config import Section
from elastic_trainer.jobs.digits import digit_images
from elastic_trainer.jobs.pillow import Image, ImageEnhance, UnidentifiedImageError
from elastic_trainer.jobs.task import Datasets, Task, build_optimizer, decay_groups
from elastic_trainer.wording import named

_TRIES = 10
_BILINEAR = Image.Resampling.BILINEAR

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


def random_view(image: Image.Image, options: ImageFolderData) -> Tensor:
    """A random part of the image, resized to ``options.size``, perhaps mirrored, its colours changed.

    Szegedy et al., 2014, https://arxiv.org/abs/1409.4842, section 6.
    """
    box = random_box(image.width, image.height, options.scale, options.ratio)
    seen = image.resize((options.size, options.size), _BILINEAR, box=box)
    if random.random() < options.flip:
        seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return as_bytes(jittered(seen, options.jitter))


def central_view(image: Image.Image, options: ImageFolderData) -> Tensor:
    """The image with its shorter side resized to ``options.resize``, and of that the central square."""
    side = min(image.width, image.height) * options.size / options.resize
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return as_bytes(image.resize((options.size, options.size), _BILINEAR, box=(left, top, left + side, top + side)))


def random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Box:
    """A part of a (width, height) image; where no draw fits into it, the largest central one of an allowed shape."""
    for _ in range(_TRIES):
        area = width * height * random.uniform(*scale)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        across, down = math.sqrt(area * shape), math.sqrt(area / shape)
        if across <= width and down <= height:
            left, top = random.uniform(0, width - across), random.uniform(0, height - down)
            return left, top, min(width, left + across), min(height, top + down)
    across, down = min(width, height * ratio[1]), min(height, width / ratio[0])
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down


def jittered(image: Image.Image, jitter: tuple[float, float, float]) -> Image.Image:
    """Brightness, contrast and saturation each times a factor within 1 +- its ``jitter``, in random order."""
    if not any(jitter):
        return image
    kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    changes = list(zip(kinds, jitter, strict=True))
    random.shuffle(changes)
    for kind, most in changes:
        image = kind(image).enhance(random.uniform(max(0.0, 1.0 - most), 1.0 + most))
    return image


def as_bytes(image: Image.Image) -> Tensor:
    """(3, height, width) bytes of an RGB image: a quarter of what floats would take on the way to a device."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def normalized(images: Tensor, mean: tuple[float, float, float], std: tuple[float, float, float]) -> Tensor:
    """(n, 3, h, w) bytes to floats; ``mean`` and ``std`` of each colour, white being 1."""
    centre, spread = (torch.tensor(each, device=images.device).view(1, 3, 1, 1) * 255.0 for each in (mean, std))
    return (images.float() - centre) / spread


EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """``samples``, sorted by class and name: the path of a file below ``root``, and the number of its class."""

    root: Path
    classes: tuple[str, ...]
    samples: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.samples)

    def thinned(self, count: int | None) -> ImageFiles:
        """At most ``count`` files, evenly spread: of each class about the same part."""
        if count is None or count >= len(self):
            return self
        return replace(self, samples=tuple(self.samples[index * len(self) // count] for index in range(count)))


def image_files(root: Path) -> ImageFiles:
    """What is in the class folders of ``root``: the classes are their sorted names, hidden ones and files aside."""
    classes = tuple(_names(root, folders=True))
    if not classes:
        raise DataError(f"{root}: holds no class folders", hint="put the images of each class into a folder of its own")
    samples: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        inside = [file for file in _names(root / name, folders=False) if Path(file).suffix.lower() in EXTENSIONS]
        if not inside:
            known = ", ".join(sorted(EXTENSIONS))
            raise DataError(f"{root / name}: a class without images", hint=f"add some ({known}), or remove the folder")
        samples += [(f"{name}/{file}", label) for file in inside]
    return ImageFiles(root, classes, tuple(samples))


def _names(directory: Path, *, folders: bool) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(each.name for each in entries if each.is_dir() == folders and not each.name.startswith("."))
    except OSError as error:
        hint = "name a directory with class folders"
        raise DataError(f"{directory}: {error.strerror or error}", hint=hint) from error


def read_image(path: Path) -> Image.Image:
    """The image in ``path`` in RGB, all of it decoded."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise SampleError(f"{path}: not an image", hint="repair or remove it, or say bad_samples=skip") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise StorageReadError(f"{path}: cannot be read: {reason}", hint="look at the storage") from error
        raise SampleError(
            f"{path}: cannot be read as an image: {reason}", hint="repair or remove it, or say bad_samples=skip"
        ) from error


class ImageFolder:
    """Samples (image, label): what ``view`` makes of the image, and the number of its class."""

    def __init__(self, files: ImageFiles, view: Callable[[Image.Image], Tensor], *, deterministic: bool) -> None:
        self.files, self._view = files, view
        self.deterministic = deterministic
        """Whether the view draws no random numbers."""
        self.generators = ("random",)
        """Those that a view may draw from."""

    def __len__(self) -> int:
        return len(self.files)

    def key(self, index: int) -> str:
        """The path of a sample's file below the folder."""
        return self.files.samples[index][0]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files.samples[index]
        return self._view(read_image(self.files.root / path)), label


class ResNetOptions(Section):
    """``model:`` which residual network."""

    depth: Literal[18, 34, 50, 101] = Field(default=18, description="layers")
    width: int = Field(default=64, ge=1, le=1024, description="channels of the first stage")
    stem: Literal["imagenet", "small"] = Field(default="imagenet", description="small: for images of about 32 pixels")
    zero_gamma: bool = Field(default=True, description="blocks begin as the identity (Goyal et al., 2017, section 5.1)")


_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and what goes past them; (n, inputs, h, w) to (n, width, h / stride, w / stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + (self.downsample(x) if self.downsample else x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; (n, inputs, h, w) to (n, 4 width, h / stride, w / stride)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        return functional.relu(self.bn3(self.conv3(inner)) + (self.downsample(x) if self.downsample else x))


class ResNet(nn.Module):
    """(n, 3, h, w) to scores of (n, classes)."""

    def __init__(self, classes: int, options: ResNetOptions) -> None:
        super().__init__()
        depth, width, small = options.depth, options.width, options.stem == "small"
        kind = BasicBlock if depth < 50 else Bottleneck
        self.conv1 = _conv(3, width, 3) if small else _conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width * 2**stage for stage in range(4)]
        inputs = [width, *(each * kind.expansion for each in widths[:3])]
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(kind(given, own, stride), *(kind(own * kind.expansion, own) for _ in range(blocks - 1)))
            for given, own, blocks, stride in zip(inputs, widths, _BLOCKS[depth], (1, 2, 2, 2), strict=True)
        )
        self.fc = nn.Linear(widths[3] * kind.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif options.zero_gamma and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_((module.bn2 if isinstance(module, BasicBlock) else module.bn3).weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """What goes past a block, where it changes the shape."""
    same = stride == 1 and inputs == outputs
    return None if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


Share = Annotated[float, Field(gt=0.0, le=1.0)]
Ratio = Annotated[float, Field(gt=0.0)]
Jitter = Annotated[float, Field(ge=0.0)]
Spread = Annotated[float, Field(gt=0.0)]


class ImageFolderData(Section):
    """``data:`` where the images are, and how they are seen."""

    directory: Path | None = Field(default=None, description="has train/ and val/ or test/; null: the shipped digits")
    train: Path | None = Field(
        default=None, description="instead of directory, with `data.test`: the class folders to train on"
    )
    test: Path | None = Field(default=None, description="the class folders to test on")
    cache: Path | None = Field(default=None, description="where the digits are written")
    limit: int | None = Field(default=None, ge=1, description="train on N samples only, evenly spread")
    size: int = Field(default=224, ge=8, description="pixels that the network sees in each direction")
    resize: int = Field(default=256, ge=8, description="of the shorter side in tests, before the middle is cut out")
    scale: tuple[Share, Share] = Field(default=(0.08, 1.0), description="part of the area that training sees")
    ratio: tuple[Ratio, Ratio] = Field(default=(3 / 4, 4 / 3), description="width over height of that part")
    flip: float = Field(default=0.5, ge=0.0, le=1.0, description="how often training images are mirrored")
    jitter: tuple[Jitter, Jitter, Jitter] = Field(
        default=(0.0, 0.0, 0.0), description="of brightness, contrast and saturation"
    )
    mean: tuple[float, float, float] = Field(default=(0.485, 0.456, 0.406), description="subtracted from each channel")
    std: tuple[Spread, Spread, Spread] = Field(
        default=(0.229, 0.224, 0.225), description="each channel is divided by it"
    )

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

    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0, description="of the loss")
    decay_all: bool = Field(default=False, description="weight decay of biases and norms too")
    top: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 5), min_length=1, description="metrics top1, top5: the class is among the K best guesses"
    )


class ImageClasses(Task):
    """Images in class folders."""

    Data = ImageFolderData
    Model = ResNetOptions
    Options = ImageFolderOptions

    def datasets(self) -> Datasets:
        options: ImageFolderData = self.data_options
        train, test = (image_files(directory) for directory in directories(options))
        for one, other in ((train, test), (test, train)):  # a number must mean the same in both
            if lacking := [name for name in one.classes if name not in other.classes]:
                what = f"{'classes' if len(lacking) > 1 else 'class'} {named(map(repr, lacking), 5)}"
                raise DataError(f"{other.root} lacks {what} of {one.root}", hint="both need the same class folders")
        self.classes = train.classes
        random_part, middle = partial(random_view, options=options), partial(central_view, options=options)
        return Datasets(
            train=ImageFolder(train.thinned(options.limit), random_part, deterministic=False),
            test=ImageFolder(test, middle, deterministic=True),
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
        kept = [k for k in self.options.top if k <= scores.shape[1]]
        best = scores.topk(max(kept, default=0), dim=1).indices == labels[:, None]  # (n, most), at most one in a row
        among = {f"top{k}": best[:, :k].sum() for k in kept}
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
