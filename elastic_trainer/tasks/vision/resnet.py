"""Residual networks: He et al., "Deep Residual Learning for Image Recognition" (2015), https://arxiv.org/abs/1512.03385.

The bottleneck strides in its 3x3 convolution (known as v1.5), and parameters are named as torchvision names them, so
that the weights it offers can be loaded. 18 and 50 layers have 11,689,512 and 25,557,032 parameters at 1,000 classes.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer.training.config import Section


class ResNetOptions(Section):
    """``model:`` which residual network."""

    depth: Literal[18, 34, 50, 101] = 18
    width: int = Field(default=64, ge=1, le=1024, description="channels of the first stage; 64 in the paper")
    stem: Literal["imagenet", "small"] = Field(
        default="imagenet", description="small: keeps the resolution, for images of about 32 pixels"
    )
    zero_gamma: bool = Field(default=True, description="blocks begin as the identity (Goyal et al., 2017, section 5.1)")


_BLOCKS: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
}


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

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The one before the addition."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + _past(self.downsample, x))


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

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The one before the addition."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        return functional.relu(self.bn3(self.conv3(inner)) + _past(self.downsample, x))


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
        stages = [_stage(kind, *each) for each in zip(inputs, widths, _BLOCKS[depth], (1, 2, 2, 2), strict=True)]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(widths[3] * kind.expansion, classes)
        _initialize(self, options.zero_gamma)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(functional.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


def _stage(kind: type[BasicBlock | Bottleneck], inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    following = (kind(width * kind.expansion, width) for _ in range(blocks - 1))
    return nn.Sequential(kind(inputs, width, stride), *following)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """What goes past a block, where it changes the shape."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _past(shortcut: nn.Module | None, x: Tensor) -> Tensor:
    return x if shortcut is None else shortcut(x)


@torch.no_grad()
def _initialize(network: nn.Module, zero_gamma: bool) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_gamma and isinstance(module, (BasicBlock, Bottleneck)):
            nn.init.zeros_(module.last_norm.weight)
