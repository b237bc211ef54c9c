"""The multi-resolution network has the asked branches, mixes them, and can learn to tell instances apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_trainer.jobs.keypoints import Fusion, HighResolutionNet, HrnetOptions, StageOptions, with_coordinates


def options(channels: tuple[int, ...], stages: list[tuple[int, int, int]], **more: Any) -> HrnetOptions:
    """``stages``: branches, blocks and modules of each."""
    plans = tuple(StageOptions(branches=one, blocks=two, modules=three) for one, two, three in stages)
    return HrnetOptions(channels=channels, stages=plans, **{"stem_halvings": 1, **more})


@pytest.mark.parametrize(
    ("channels", "stages", "halvings", "size"),
    [
        ((4,), [(1, 1, 1)], 1, 16),
        ((4, 6), [(1, 1, 1), (2, 2, 2)], 1, 16),
        ((4, 6, 8), [(1, 1, 1), (3, 1, 1)], 2, 32),
    ],
)
def test_maps_have_the_resolution_of_the_first_branch(
    channels: tuple[int, ...], stages: list[tuple[int, int, int]], halvings: int, size: int
) -> None:
    """Heat maps and tags, one of each per kind of point. Every parameter has a part in them, which DDP insists on."""
    network = HighResolutionNet(5, options(channels, stages, stem_halvings=halvings))
    heat, tags = network(torch.rand(2, 3, size, size))
    assert heat.shape == tags.shape == (2, 5, size // 2**halvings, size // 2**halvings)
    (heat.square().sum() + tags.square().sum()).backward()
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


def test_a_fusion_keeps_shapes_and_mixes_all_branches() -> None:
    """Each output follows each input, whichever resolution it has."""
    torch.manual_seed(0)  # with few channels every path of one branch may be below zero, which ReLU cuts off
    fusion = Fusion((2, 3, 4), targets=3).eval()
    inputs = [torch.rand(1, width, side, side, requires_grad=True) for width, side in ((2, 8), (3, 4), (4, 2))]
    outputs = fusion(inputs)
    assert [tuple(each.shape) for each in outputs] == [tuple(each.shape) for each in inputs]
    for output in outputs:
        slopes = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        assert all(bool(slope.any()) for slope in slopes)


def test_coordinates_go_from_one_corner_to_the_other() -> None:
    seen = with_coordinates(torch.zeros(2, 3, 3, 5))
    assert seen.shape == (2, 5, 3, 5)
    assert seen[1, 3:, 0, 0].tolist() == [-1.0, -1.0]
    assert seen[1, 3:, 2, 0].tolist() == [1.0, -1.0]
    assert seen[1, 3:, 1, 4].tolist() == [0.0, 1.0]


def test_only_with_coordinates_two_equal_things_get_different_tags() -> None:
    """A network without them says the same of both, far from the borders."""
    image = torch.zeros(1, 3, 64, 64)
    image[:, :, 28:32, 16:20] = image[:, :, 28:32, 48:52] = 1.0
    for coordinates in (False, True):
        torch.manual_seed(0)
        network = HighResolutionNet(1, options((4,), [(1, 1, 1)], coordinates=coordinates)).eval()
        with torch.no_grad():
            _, tags = network(image)
        alike = torch.allclose(tags[0, 0, 14:16, 8:10], tags[0, 0, 14:16, 24:26])
        assert alike is not coordinates


def test_with_coordinates_tags_begin_as_the_place() -> None:
    """Things apart differ from the start by more than what belongs together: training need not find that out."""
    torch.manual_seed(0)
    network = HighResolutionNet(2, options((4,), [(1, 1, 1)], coordinates=True)).eval()
    with torch.no_grad():
        _, tags = network(torch.zeros(1, 3, 64, 64))
    middle = tags[0, :, 16, 16]
    assert (tags[0, :, 16, 28] - middle > 2.0).all()
    assert (tags[0, :, 28, 16] - middle > 1.0).all()
    assert ((tags[0, :, 16, 18] - middle).abs() < 1.0).all()
