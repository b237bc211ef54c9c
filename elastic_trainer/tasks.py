"""The earlier name of the ready-made tasks: their modules are those of :mod:`elastic_trainer.jobs`."""

from __future__ import annotations

import sys

from elastic_trainer import jobs
from elastic_trainer.jobs import (
    corpus,
    digits,
    gpt,
    gpt_sample,
    imagefolder,
    keypoints,
    mnist,
    pillow,
    scripts,
    texts,
)

_HOMES = {
    "language": jobs,
    "language.corpus": corpus,
    "language.gpt": gpt,
    "language.gpt_sample": gpt_sample,
    "language.text_files": texts,
    "language.tokenizer": texts,
    "language.transformer": gpt,
    "pose": jobs,
    "pose.coco": keypoints,
    "pose.heatmaps": keypoints,
    "pose.hrnet": keypoints,
    "pose.keypoints": keypoints,
    "pose.poses": keypoints,
    "pose.scenes": keypoints,
    "scripts": scripts,
    "vision": jobs,
    "vision.augmentation": imagefolder,
    "vision.digits": digits,
    "vision.image_files": imagefolder,
    "vision.imagefolder": imagefolder,
    "vision.mnist": mnist,
    "vision.pillow": pillow,
    "vision.resnet": imagefolder,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _HOMES.items()})
