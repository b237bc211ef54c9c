"""The residual networks are the published ones, and can be made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_trainer.jobs.imagefolder import Bottleneck, ResNet, ResNetOptions


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_parameters_are_those_of_the_published_networks(depth: Any, parameters: int) -> None:
    with torch.device("meta"):
        network = ResNet(1000, ResNetOptions(depth=depth))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_parameters_are_named_as_torchvision_names_them() -> None:
    with torch.device("meta"):
        names = set(ResNet(1000, ResNetOptions(depth=50)).state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer3.5.conv2.weight",
        "layer4.2.bn3.bias",
        "fc.weight",
        "fc.bias",
    } <= names
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}


@pytest.mark.parametrize(("stem", "side"), [("small", 4), ("imagenet", 1)])
def test_the_small_stem_keeps_the_resolution(stem: Any, side: int) -> None:
    """Of 32 pixels 4 are left before the last mean, of the usual stem one."""
    network = ResNet(3, ResNetOptions(width=4, stem=stem)).eval()
    sides: list[int] = []
    network.layer4.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[-1]))
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert sides == [side]


def test_with_zero_gamma_blocks_begin_as_the_identity() -> None:
    """What goes past a block is all that comes out of it."""
    network = ResNet(2, ResNetOptions(depth=50, width=4, stem="small")).eval()
    block = network.layer1[1]
    assert isinstance(block, Bottleneck)
    x = torch.rand(2, 16, 8, 8)
    with torch.no_grad():
        assert torch.equal(block(x), x)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [bool(norm.weight.any()) for norm in norms].count(False) == 16
