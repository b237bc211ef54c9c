"""What a network sees of an image: a random part of it in training, its middle in a test.

Random numbers come from Python's generator, which the session keys by (seed, epoch, sample): the same image looks the
same on whatever rank it is drawn, and after a restart.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.tasks.vision.pillow import Image, ImageEnhance

_TRIES = 10
_BILINEAR = Image.Resampling.BILINEAR

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


@dataclass(frozen=True, slots=True)
class RandomView:
    """A random part of the image, resized to ``size``, perhaps mirrored, its colours changed.

    The part has ``scale`` of the image's area and sides of ``ratio`` (Szegedy et al., 2014,
    https://arxiv.org/abs/1409.4842, section 6); ``jitter`` is how far brightness, contrast and saturation may move.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __call__(self, image: Image.Image) -> Tensor:
        box = random_box(image.width, image.height, self.scale, self.ratio)
        seen = image.resize((self.size, self.size), _BILINEAR, box=box)
        if random.random() < self.flip:
            seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return as_bytes(jittered(seen, self.jitter))


@dataclass(frozen=True, slots=True)
class CentralView:
    """The image with its shorter side resized to ``resize``, and of that the central square of ``size``."""

    size: int
    resize: int

    def __call__(self, image: Image.Image) -> Tensor:
        side = min(image.width, image.height) * self.size / self.resize
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        return as_bytes(image.resize((self.size, self.size), _BILINEAR, box=box))


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
    shape = (1, 3, 1, 1)
    centre = torch.tensor(mean, device=images.device).view(shape) * 255.0
    spread = torch.tensor(std, device=images.device).view(shape) * 255.0
    return (images.float() - centre) / spread
