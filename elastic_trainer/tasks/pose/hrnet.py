"""A network that keeps high resolution: parallel branches, each at half the resolution of the one before, fused often.

Sun et al., "Deep High-Resolution Representation Learning for Human Pose Estimation" (2019),
https://arxiv.org/abs/1902.09212; with a map of tags beside each heat map as in "Bottom-up Higher-Resolution Networks"
(Cheng et al., 2019, https://arxiv.org/abs/1908.10357). Blocks are those of the residual networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from elastic_trainer.tasks.vision.resnet import BasicBlock
from elastic_trainer.training.config import Section

Width = Annotated[int, Field(ge=1, le=1024)]

_HEAT_STD = 0.001
_TAG_SLOPES = (3.0, 5.0)
"""By how much a tag grows at first half the picture down, and to the right, where the network is given places."""


class StageOptions(Section):
    """``modules`` times: ``blocks`` residual blocks in each of ``branches`` branches, then a fusion of them all."""

    branches: int = Field(ge=1)
    blocks: int = Field(ge=1)
    modules: int = Field(default=1, ge=1)


class HrnetOptions(Section):
    """``model:`` the network."""

    channels: tuple[Width, ...] = Field(default=(32, 64, 128, 256), min_length=1, description="of each branch")
    stages: tuple[StageOptions, ...] = Field(
        default=(
            StageOptions(branches=1, blocks=4),
            StageOptions(branches=2, blocks=4),
            StageOptions(branches=3, blocks=4, modules=4),
            StageOptions(branches=4, blocks=4, modules=3),
        ),
        min_length=1,
    )
    stem_halvings: int = Field(default=2, ge=1, le=4, description="the heat map has size / 2 ** stem_halvings cells")
    coordinates: bool = Field(default=False, description="give the network the place of each pixel")

    @model_validator(mode="after")
    def _consistent(self) -> HrnetOptions:
        branches = [stage.branches for stage in self.stages]
        if branches != sorted(branches) or branches[-1] != len(self.channels):
            raise ValueError(f"branches {branches} must not fall and end with {len(self.channels)}, one per channel")
        return self

    @property
    def stride(self) -> int:
        """Pixels in each direction of a cell of the heat map."""
        return int(2**self.stem_halvings)


class Parallel(nn.ModuleList):
    """One module for each branch."""

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        return [module(branch) for module, branch in zip(self, branches, strict=True)]


class Fusion(nn.Module):
    """Each of the first ``targets`` branches becomes the sum of all, brought to its resolution; its shape stays.

    From lower resolution by a 1x1 convolution and upsampling, from higher by 3x3 convolutions of stride 2.
    """

    def __init__(self, channels: Sequence[int], targets: int) -> None:
        super().__init__()
        every = range(len(channels))
        self.paths = nn.ModuleList(
            Parallel(_path(channels, source, target) for source in every) for target in range(targets)
        )

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        fused = []
        for target, paths in zip(branches, self.paths, strict=False):
            arrived = paths(branches)
            size = target.shape[-2:]
            same = [x if x.shape[-2:] == size else functional.interpolate(x, size, mode="nearest") for x in arrived]
            fused.append(functional.relu(torch.stack(same).sum(0)))
        return fused


def _path(channels: Sequence[int], source: int, target: int) -> nn.Module:
    """From branch ``source`` to branch ``target``, up to the upsampling."""
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(
            nn.Conv2d(channels[source], channels[target], 1, bias=False), nn.BatchNorm2d(channels[target])
        )
    steps: list[nn.Module] = []
    for step in range(source, target):
        last = step == target - 1
        outputs = channels[target] if last else channels[source]
        steps += [*_halving(channels[source], outputs), *([] if last else [nn.ReLU()])]
    return nn.Sequential(*steps)


def _halving(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs)]


class HrnetStage(nn.Module):
    """New branches from the lowest resolution there is, then the modules of ``plan``.

    The ``last`` stage gives the highest resolution alone: DDP refuses parameters that have no part in the loss.
    """

    def __init__(self, channels: Sequence[int], present: int, plan: StageOptions, *, last: bool) -> None:
        super().__init__()
        self.begun = nn.ModuleList(
            nn.Sequential(*_halving(channels[branch - 1], channels[branch]), nn.ReLU())
            for branch in range(present, plan.branches)
        )
        mine = channels[: plan.branches]
        self.blocks = nn.ModuleList(
            Parallel(nn.Sequential(*(BasicBlock(width, width) for _ in range(plan.blocks))) for width in mine)
            for _ in range(plan.modules)
        )
        targets = [plan.branches] * (plan.modules - 1) + [1 if last else plan.branches]
        self.fusions = nn.ModuleList(Fusion(mine, each) for each in targets)

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        for begin in self.begun:
            branches = [*branches, begin(branches[-1])]
        for blocks, fusion in zip(self.blocks, self.fusions, strict=True):
            branches = fusion(blocks(branches))
        return branches


class HighResolutionNet(nn.Module):
    """(n, 3, h, w) to heat maps and tags, each (n, points, h / stride, w / stride).

    With ``coordinates`` the network gets the place of each pixel, and tags begin as the place. Without them similar
    things have similar tags, and the loss has no slope where all tags are the same.

    h and w must be multiples of stride * 2 ** (branches - 1).
    """

    def __init__(self, points: int, options: HrnetOptions) -> None:
        super().__init__()
        channels, coordinates = options.channels, options.coordinates
        self.coordinates = coordinates
        colours = 5 if coordinates else 3
        stem: list[nn.Module] = []
        for number in range(options.stem_halvings):
            stem += [*_halving(colours if number == 0 else channels[0], channels[0]), nn.ReLU()]
        self.stem = nn.Sequential(*stem)
        present = [1, *(stage.branches for stage in options.stages)]
        self.stages = nn.ModuleList(
            HrnetStage(channels, before, stage, last=number == len(options.stages))
            for number, (before, stage) in enumerate(zip(present, options.stages, strict=False), 1)
        )
        self.heat = nn.Conv2d(channels[0], points, 1)
        self.tags = nn.Conv2d(channels[0] + 2 * coordinates, points, 1)
        nn.init.normal_(self.heat.weight, std=_HEAT_STD)
        nn.init.zeros_(self.heat.bias)  # type: ignore[arg-type]
        if coordinates:
            with torch.no_grad():
                self.tags.weight[:, -2:, 0, 0] = torch.tensor(_TAG_SLOPES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        branches = [self.stem(with_coordinates(images) if self.coordinates else images)]
        for stage in self.stages:
            branches = stage(branches)
        finest = branches[0]
        return self.heat(finest), self.tags(with_coordinates(finest) if self.coordinates else finest)


def with_coordinates(images: Tensor) -> Tensor:
    """(n, c, h, w) to (n, c + 2, h, w): where each pixel is, from -1 to 1 down and to the right.

    Else things that look alike would have tags alike (Liu et al., 2018, https://arxiv.org/abs/1807.03247).
    """
    count, _, height, width = images.shape
    down = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)[:, None].expand(height, width)
    right = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype).expand(height, width)
    return torch.cat([images, torch.stack([down, right]).expand(count, 2, height, width)], dim=1)
