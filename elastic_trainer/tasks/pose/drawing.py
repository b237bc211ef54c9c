"""Key points drawn into pictures, for people: crosses where they are, dots in a colour for each instance found."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from elastic_trainer.tasks.pose.poses import Instance
from elastic_trainer.tasks.vision.augmentation import as_bytes
from elastic_trainer.tasks.vision.pillow import Image, ImageDraw

_ENLARGED_TO = 256
_TRUTH = (255, 255, 255)


def drawn_points(image: Tensor, points: Tensor, found: Sequence[Instance]) -> Tensor:
    """The (3, h, w) bytes of ``image``, enlarged where small, with the true ``points``, (m, k, 3), and those found."""
    factor = max(1, _ENLARGED_TO // image.shape[-1])
    large = image.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
    picture = Image.fromarray(np.ascontiguousarray(large.permute(1, 2, 0).numpy().astype(np.uint8)))
    draw = ImageDraw.Draw(picture)
    arm = max(2, picture.width // 64)
    for number, instance in enumerate(found):
        red, green, blue = colorsys.hsv_to_rgb(number / max(1, len(found)), 1.0, 1.0)
        colour = (int(255 * red), int(255 * green), int(255 * blue))
        for peak in instance.peaks.values():
            x, y = peak.x * factor, peak.y * factor
            draw.ellipse((x - arm, y - arm, x + arm, y + arm), fill=colour)
    for x, y, visible in torch.flatten(points, 0, 1).tolist():
        if visible > 0:
            x, y = x * factor, y * factor
            draw.line((x - arm, y, x + arm, y), fill=_TRUTH)
            draw.line((x, y - arm, x, y + arm), fill=_TRUTH)
    return as_bytes(picture)
