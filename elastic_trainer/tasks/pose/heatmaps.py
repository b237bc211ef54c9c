"""What the network is to say of a picture's key points, and how far it is from that.

A heat map of each kind of point, and a map of tags that are alike within an instance and unlike between instances:
Newell, Huang and Deng, "Associative Embedding" (2016), https://arxiv.org/abs/1611.05424. Shapes: n pictures, m
instances, k kinds of points, maps of h by w. A point is (x, y, visible) in pixels of the picture, the middle of the
first pixel being (0.5, 0.5); a cell of the map covers ``stride`` pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_map(points: Tensor, stride: int) -> Tensor:
    """Places of (..., 3) points in cells, (..., 2): the middle of the first cell is (0, 0)."""
    return points[..., :2] / stride - 0.5


def targets(points: Tensor, shape: tuple[int, int], stride: int, sigma: float) -> Tensor:
    """(n, k, h, w): at each visible one of the (n, m, k, 3) ``points`` a Gaussian of ``sigma`` cells, peaks of 1.

    Where two come together, the larger value counts.
    """
    places = on_map(points, stride)
    rows = torch.arange(shape[0], device=points.device, dtype=points.dtype)
    columns = torch.arange(shape[1], device=points.device, dtype=points.dtype)
    across = torch.exp(-((columns - places[..., :1]) ** 2) / (2 * sigma**2))
    down = torch.exp(-((rows - places[..., 1:]) ** 2) / (2 * sigma**2)) * (points[..., 2:] > 0)
    maps = points.new_zeros(len(points), points.shape[2], *shape)
    for instance in range(points.shape[1]):  # not all at once: COCO has up to 30 of them
        one = down[:, instance, :, :, None] * across[:, instance, :, None, :]
        maps = torch.maximum(maps, one)
    return maps


def heat_losses(heat: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    """(n,): for each picture the mean squared difference over the cells in which ``mask``, (n, h, w), is 1."""
    squared = (heat - wanted) ** 2 * mask[:, None]
    cells = mask.sum(dim=(1, 2)).clamp(min=1.0) * heat.shape[1]
    return squared.sum(dim=(1, 2, 3)) / cells


def tags_at(tags: Tensor, points: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """The tags, (n, m, k), at the cells of the points, and which of these, (n, m, k), are visible and on the map."""
    height, width = tags.shape[-2:]
    cells = on_map(points, stride).round().long()
    column, row = cells[..., 0], cells[..., 1]
    known = (points[..., 2] > 0) & (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    flat = tags.flatten(2)  # (n, k, h * w)
    return flat.gather(2, index.transpose(1, 2)).transpose(1, 2), known


def tag_losses(tags: Tensor, points: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """(n,) and (n,): how unlike the tags within instances are, and how alike those of different instances.

    The first is the mean over instances of the variance of their tags; the second the mean over pairs of instances of
    exp(-d**2 / 2), d being the distance of their mean tags. Pictures with too few instances have 0.
    """
    found, known = tags_at(tags, points, stride)
    weight = known.to(found.dtype)
    count = weight.sum(2)  # (n, m)
    mean = (found * weight).sum(2) / count.clamp(min=1.0)
    within = ((found - mean[..., None]) ** 2 * weight).sum(2) / count.clamp(min=1.0)
    present = (count > 0).to(found.dtype)
    instances = present.sum(1)
    pull = (within * present).sum(1) / instances.clamp(min=1.0)
    alike = torch.exp(-((mean[:, :, None] - mean[:, None, :]) ** 2) / 2)
    pairs = present[:, :, None] * present[:, None, :] * (1.0 - torch.eye(points.shape[1], device=points.device))
    push = (alike * pairs).sum(dim=(1, 2)) / (instances * (instances - 1.0)).clamp(min=1.0)
    return pull, push
