"""Fault-tolerant, elastic training for PyTorch: keep training while nodes die, hang, leave and arrive.

The names below load on first use, so that ``import elastic_trainer`` costs neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_trainer.checkpoint.codec import whole as whole
    from elastic_trainer.data.sampler import Batch as Batch
    from elastic_trainer.data.sources import MapDataset as MapDataset
    from elastic_trainer.data.sources import SeekableStream as SeekableStream
    from elastic_trainer.data.sources import Streams
    from elastic_trainer.data.tar_shards import TarShards as TarShards
    from elastic_trainer.jobs.config import Section
    from elastic_trainer.jobs.reporting import RunLog
    from elastic_trainer.jobs.task import Datasets, Exhibits, Task
    from elastic_trainer.jobs.trainer import Trainer
    from elastic_trainer.local.launch import launch as launch
    from elastic_trainer.worker.session import Session as Session
    from elastic_trainer.worker.steps.engine import Step as Step
    from elastic_trainer.worker.steps.options import CheckOptions as CheckOptions
    from elastic_trainer.worker.steps.options import GroupOptions as GroupOptions
    from elastic_trainer.worker.steps.options import SavingOptions as SavingOptions

__version__ = "0.1.0"

_LAZY = {
    "Batch": "elastic_trainer.data.sampler",
    "CheckOptions": "elastic_trainer.worker.steps.options",
    "Datasets": "elastic_trainer.jobs.task",
    "Exhibits": "elastic_trainer.jobs.task",
    "GroupOptions": "elastic_trainer.worker.steps.options",
    "SavingOptions": "elastic_trainer.worker.steps.options",
    "MapDataset": "elastic_trainer.data.sources",
    "Section": "elastic_trainer.jobs.config",
    "SeekableStream": "elastic_trainer.data.sources",
    "Streams": "elastic_trainer.data.sources",
    "TarShards": "elastic_trainer.data.tar_shards",
    "RunLog": "elastic_trainer.jobs.reporting",
    "Session": "elastic_trainer.worker.session",
    "Step": "elastic_trainer.worker.steps.engine",
    "launch": "elastic_trainer.local.launch",
    "Task": "elastic_trainer.jobs.task",
    "Trainer": "elastic_trainer.jobs.trainer",
    "whole": "elastic_trainer.checkpoint.codec",
}

__all__ = [
    "Batch",
    "CheckOptions",
    "Datasets",
    "Exhibits",
    "GroupOptions",
    "MapDataset",
    "RunLog",
    "SavingOptions",
    "Section",
    "SeekableStream",
    "Session",
    "Step",
    "Streams",
    "TarShards",
    "Task",
    "Trainer",
    "__version__",
    "launch",
    "whole",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home module on first use."""
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'elastic_trainer' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
