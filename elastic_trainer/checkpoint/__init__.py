"""Checkpoints that exist completely or not at all, and are verified at every read. Imports no torch.

Names and their order: layout. State to bytes and back: codec (structure), tensors and tensorfile (data). Bytes to disk:
image, commit, storage; by several processes: sharing, sharded, joint; beside training: arena, snapshot, background.
Back: reading, parts, goals, live, inventory. What stays: retention, janitor. Who saves: claim. All together: manager.
"""

from elastic_trainer.checkpoint.arena import Arena, NoRoomError
from elastic_trainer.checkpoint.background import BackgroundSaves, Save
from elastic_trainer.checkpoint.claim import Owner
from elastic_trainer.checkpoint.events import Event, EventSink, Transition
from elastic_trainer.checkpoint.faults import DamagedError, GoneError, UnreadableError
from elastic_trainer.checkpoint.inventory import Description, Entry, Soundness, describe
from elastic_trainer.checkpoint.live import NOTHING_LIVE, Live
from elastic_trainer.checkpoint.manager import CheckpointManager, Committed, Loaded, SaveInfo
from elastic_trainer.checkpoint.manifest import Manifest
from elastic_trainer.checkpoint.retention import BestMode, Retention
from elastic_trainer.checkpoint.sharded import Places
from elastic_trainer.checkpoint.snapshot import StateSnapshot

__all__ = [
    "NOTHING_LIVE",
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
    "Live",
    "Loaded",
    "Manifest",
    "NoRoomError",
    "Owner",
    "Places",
    "Retention",
    "Save",
    "SaveInfo",
    "Soundness",
    "StateSnapshot",
    "Transition",
    "UnreadableError",
    "describe",
]
