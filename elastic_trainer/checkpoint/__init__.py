"""Checkpoints that exist completely or not at all, and are verified at every read. Imports no torch.

A state becomes files and back (codec), with checksums of all bytes (manifest); it is copied into memory
(memory), written beside training (background) and committed, by one process or several (commit), to a directory or
bucket (storage). Back: reading. Which checkpoints there are, and which stay: manager, retention.
"""

from elastic_trainer.checkpoint.background import BackgroundSaves, Save
from elastic_trainer.checkpoint.codec import ShardGroup
from elastic_trainer.checkpoint.commit import Owner
from elastic_trainer.checkpoint.manager import (
    CheckpointManager,
    Committed,
    Description,
    Entry,
    Event,
    EventSink,
    Loaded,
    SaveInfo,
    Soundness,
    Transition,
    describe,
)
from elastic_trainer.checkpoint.manifest import DamagedError, GoneError, Manifest, UnreadableError
from elastic_trainer.checkpoint.memory import Arena, NoRoomError, StateSnapshot
from elastic_trainer.checkpoint.reading import LOAD_NEW, LoadInto
from elastic_trainer.checkpoint.retention import BestMode, Retention

__all__ = [
    "LOAD_NEW",
    "Arena",
    "BackgroundSaves",
    "BestMode",
    "CheckpointManager",
    "Committed",
    "DamagedError",
    "Description",
    "Entry",
    "Event",
    "EventSink",
    "GoneError",
    "LoadInto",
    "Loaded",
    "Manifest",
    "NoRoomError",
    "Owner",
    "Retention",
    "Save",
    "SaveInfo",
    "ShardGroup",
    "Soundness",
    "StateSnapshot",
    "Transition",
    "UnreadableError",
    "describe",
]
