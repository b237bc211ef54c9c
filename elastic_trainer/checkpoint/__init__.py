"""Checkpoints that exist completely or not at all, and are verified at every read. Imports no torch.

Names and their order: layout. State to bytes and back: codec (structure), tensors and tensorfile (data). Bytes to disk:
image, commit, storage; by several processes: sharing, sharded, joint; beside training: arena, snapshot, background.
Back: reading, parts, goals, live, inventory. What stays: retention, janitor. Who saves: claim. All together: manager.
"""

from elastic_trainer.checkpoint.background import BackgroundSaves, Save
from elastic_trainer.checkpoint.commit import Event, EventSink, Owner, Transition
from elastic_trainer.checkpoint.layout import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.manager import (
    CheckpointManager,
    Committed,
    Description,
    Entry,
    Loaded,
    SaveInfo,
    Soundness,
    describe,
)
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.memory import Arena, NoRoomError, StateSnapshot
from elastic_trainer.checkpoint.reading import LOAD_NEW, LoadInto
from elastic_trainer.checkpoint.retention import BestMode, Retention
from elastic_trainer.checkpoint.tensors import ShardGroup

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
