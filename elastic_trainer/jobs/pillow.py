"""The one door to Pillow, which only the extra ``examples`` installs. Importing it raises DataError where it lacks."""

from __future__ import annotations

from elastic_trainer.errors import DataError

try:
    from PIL import Image, ImageDraw, ImageEnhance, UnidentifiedImageError
except ModuleNotFoundError as error:
    raise DataError(
        "this task reads images with the package Pillow, which is not installed",
        hint="pip install elastic-trainer[examples]",
    ) from error

__all__ = ["Image", "ImageDraw", "ImageEnhance", "UnidentifiedImageError"]
