"""Jobs: the trainer of job files, and ready-made tasks, each a task class and a job file of the same name.

Built on the public API of elastic_trainer alone. Tasks are loaded on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import did_you_mean

_HOMES = {
    "gpt": ("elastic_trainer.jobs.gpt", "Gpt"),
    "imagefolder": ("elastic_trainer.jobs.imagefolder", "ImageClasses"),
    "keypoints": ("elastic_trainer.jobs.keypoints", "Keypoints"),
    "mnist": ("elastic_trainer.jobs.mnist", "Mnist"),
}


def script(name: str) -> Path | None:
    """The ready-made script called ``name``, which takes ``--directory`` for its checkpoints; None if there is none."""
    return Path(__file__).with_name("scripts") / "session_script.py" if name == "script" else None


def names() -> list[str]:
    """The ready-made tasks."""
    return sorted(_HOMES)


def home(name: str) -> tuple[str, str]:
    """The module and the class of the ready-made task ``name``; ConfigError if there is none of that name."""
    if name not in _HOMES:
        hint = did_you_mean(name, names()) or f"ready-made: {', '.join(names())}; your own: module:Class"
        raise ConfigError(f"there is no ready-made task {name!r}", hint=hint)
    return _HOMES[name]


def ensure_data(name: str, data: Mapping[str, Any]) -> None:
    """DataError if the ready-made ``name`` lacks a package that brings or reads its data; loads no torch.

    ``data`` is what the job file says of it: data of the user's own are left to the task, which reads them whole.
    """
    if name not in _HOMES and script(name) is None:
        return
    if name in ("imagefolder", "keypoints"):
        import_module("elastic_trainer.jobs.pillow")
    if any(data.get(key) is not None for key in ("directory", "train", "files")):
        return
    if name == "gpt":
        from elastic_trainer.jobs.texts import shakespeare_files

        shakespeare_files()
        return
    from elastic_trainer.jobs.digits import path_of, shipped_file

    if name != "imagefolder" or not path_of(data.get("cache")).is_dir():
        shipped_file()
