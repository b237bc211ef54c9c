"""Ready jobs on real data: each a task class and a job file of the same name. Loaded on first use."""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.errors import ConfigError
from elastic_trainer.training.loading import did_you_mean

_HOMES = {
    "gpt": ("elastic_trainer.tasks.language.gpt", "Gpt"),
    "imagefolder": ("elastic_trainer.tasks.vision.imagefolder", "ImageClasses"),
    "keypoints": ("elastic_trainer.tasks.pose.keypoints", "Keypoints"),
    "mnist": ("elastic_trainer.tasks.vision.mnist", "Mnist"),
}

_SCRIPTS = {"script": "session_script.py"}


def script(name: str) -> Path | None:
    """The ready-made script called ``name``, which takes ``--directory`` for its checkpoints; None if there is none."""
    return Path(__file__).with_name("scripts") / _SCRIPTS[name] if name in _SCRIPTS else None


def names() -> list[str]:
    """The ready-made tasks."""
    return sorted(_HOMES)


def home(name: str) -> tuple[str, str]:
    """The module and the class of the ready-made task ``name``; ConfigError if there is none of that name."""
    if name not in _HOMES:
        hint = did_you_mean(name, names()) or f"ready-made: {', '.join(names())}; your own: module:Class"
        raise ConfigError(f"there is no ready-made task {name!r}", hint=hint)
    return _HOMES[name]
