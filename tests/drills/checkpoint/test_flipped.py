"""Flipped bits: each one is noticed when the checkpoint is loaded."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, DamagedError, SaveInfo
from tests.drills.checkpoint.flipping import flipped, random_bits, unnoticed
from tests.unit.checkpoint.states import manager, same, training_state


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    """Hundreds of random single-bit flips over all three files, each one reported; undone, all is well again."""
    checkpoints, _ = manager(tmp_path)
    state = training_state(width=200)
    entry = checkpoints.save(state, SaveInfo(1, metrics={"loss": 1.0}, fields={"seed": 3})).entry
    assert unnoticed(checkpoints, entry, count=300, seed=5) == []
    assert same(checkpoints.load(entry).state, state)


def test_flips_in_a_file_of_many_chunks_are_noticed(tmp_path: Path) -> None:
    """Also where several threads read, and near the boundaries of chunks."""
    checkpoints, _ = manager(tmp_path)
    entry = checkpoints.save({"w": torch.randn(9_000_000), "b": torch.randn(1_000_001)}, SaveInfo(1)).entry
    record = entry.manifest.file("tensors.safetensors")
    assert len(record.chunks) > 4
    edges = [edge for index in range(len(record.chunks)) for edge in record.bound(index)]
    for position in sorted({byte for edge in edges for byte in (edge - 1, edge) if 0 <= byte < record.size}):
        with flipped(entry.path / record.name, 8 * position):
            fresh, heard = manager(tmp_path)
            with pytest.raises(DamagedError, match=record.name):
                fresh.load(entry)
            assert heard == []


def test_a_flip_costs_one_checkpoint_and_no_data(tmp_path: Path) -> None:
    """load_newest falls back to the one before, and the damaged one is kept for inspection."""
    checkpoints = CheckpointManager(tmp_path)
    states = {step: training_state(seed=step) for step in (1, 2)}
    entries = [checkpoints.save(state, SaveInfo(step)).entry for step, state in states.items()]
    for file, bit in random_bits(entries[1].path, 30, random.Random(9)):
        with flipped(file, bit):
            loaded = CheckpointManager(tmp_path).load_newest()
            assert loaded is not None
            assert same(loaded.state, states[1])
            (corrupt,) = [name for name in os.listdir(tmp_path) if name.startswith("corrupt-")]
            os.rename(tmp_path / corrupt, entries[1].path)
    restored = CheckpointManager(tmp_path).load_newest()
    assert restored is not None
    assert same(restored.state, states[2])
