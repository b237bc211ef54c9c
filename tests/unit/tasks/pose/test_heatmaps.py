"""Targets and losses are those of the papers, by hand-made examples."""

from __future__ import annotations

import math

import pytest
import torch

from elastic_trainer.jobs.keypoints import heat_losses, tag_losses, tags_at, targets


def test_a_target_is_one_at_the_point_and_falls_as_a_gaussian() -> None:
    """The middle of cell (row 2, column 3) at stride 4 is pixel (14, 10); hidden points leave nothing."""
    points = torch.tensor([[[[14.0, 10.0, 1.0], [14.0, 10.0, 0.0]]]])
    maps = targets(points, (6, 8), stride=4, sigma=1.5)
    assert maps.shape == (1, 2, 6, 8)
    assert float(maps[0, 0, 2, 3]) == 1.0
    assert float(maps[0, 0, 2, 5]) == pytest.approx(math.exp(-4 / (2 * 1.5**2)))
    assert float(maps[0, 0, 4, 4]) == pytest.approx(math.exp(-5 / (2 * 1.5**2)))
    assert not maps[0, 1].any()


def test_of_two_instances_the_larger_value_counts() -> None:
    """Peaks stay 1 where Gaussians meet; absent instances change nothing."""
    one, other = [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]
    both = targets(torch.tensor([[[one], [other], [[0.0, 0.0, 0.0]]]]), (1, 4), stride=2, sigma=1.0)
    apart = [targets(torch.tensor([[[each]]]), (1, 4), stride=2, sigma=1.0) for each in (one, other)]
    assert torch.equal(both, torch.maximum(*apart))


def test_cells_of_which_nothing_is_known_do_not_count() -> None:
    """The mean is over the others; a picture of which nothing is known has no loss."""
    wanted, heat = torch.zeros(2, 1, 2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 1, 2, 2)
    mask = torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert heat_losses(heat, wanted, mask).tolist() == [(1 + 4 + 16) / 3, 0.0]


def scene(*tags: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of tags, and points of two instances of two kinds at cells 0, 1 and 2, 3; the last one hidden."""
    maps = torch.tensor(tags).expand(1, 2, 1, 4)
    points = torch.tensor([[[[1, 1, 1], [3, 1, 1]], [[5, 1, 1], [7, 1, 0]], [[0, 0, 0], [0, 0, 0]]]])
    return maps, points.float()


def test_tags_are_read_where_points_are() -> None:
    maps, points = scene(1.0, 2.0, 5.0, 9.0)
    points[0, 0, 1, 0] = 400.0
    tags, known = tags_at(maps, points, stride=2)
    assert known.tolist() == [[[True, False], [True, False], [False, False]]]
    assert tags[known].tolist() == [1.0, 5.0]


def test_tag_losses_pull_within_and_push_between_instances() -> None:
    pull, push = tag_losses(*scene(1.0, 2.0, 3.5, 9.0), stride=2)
    assert pull.tolist() == [pytest.approx((0.25 + 0.0) / 2)]
    assert push.tolist() == [pytest.approx(math.exp(-(2.0**2) / 2))]


def test_pictures_with_one_instance_or_none_have_nothing_to_push() -> None:
    """And no division by zero, forward or backward."""
    maps, points = scene(1.0, 2.0, 3.0, 4.0)
    points[:, 1:] = 0.0
    leaf = maps.clone().requires_grad_()
    pull, push = tag_losses(leaf.expand(2, -1, -1, -1), torch.cat([points, torch.zeros_like(points)]), stride=2)
    assert pull.tolist() == [0.25, 0.0]
    assert push.tolist() == [0.0, 0.0]
    (pull + push).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
