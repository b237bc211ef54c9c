"""Flipped bits and files cut off: each one is noticed when a state is loaded.

``ELASTIC_TRAINER_SAVE_KILLS=N`` makes 2 N of them, for each N kills of the soak.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, SaveInfo
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import StoredStates, restore
from tests.drills.checkpoint.killing import COUNT
from tests.unit.checkpoint.states import flipped, manager, same, training_state
from tests.unit.checkpoint.test_memory import filled, in_use, leave

DAMAGES = 2 * int(os.environ.get(COUNT, "0")) or 60
FOUND = {"checkpoint.quarantined", "checkpoint.skipped", "snapshot.damaged"}
"""Whose manifest is damaged is skipped."""


@contextmanager
def cut(path: Path, size: int) -> Iterator[None]:
    content = path.read_bytes()
    os.truncate(path, size)
    try:
        yield
    finally:
        path.write_bytes(content)


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


def damages(targets: Sequence[tuple[Path, list[tuple[int, int]]]], draw: random.Random) -> Iterator[tuple[Path, Any]]:
    """One after the other in each of the ``targets``: a bit flipped somewhere in its bytes, or a cut there."""
    for number in range(DAMAGES):
        path, used = targets[number % len(targets)]
        begin, end = draw.choice(used)
        flips = draw.random() < 0.5
        yield path, flipped(path, draw.randrange(8 * begin, 8 * end)) if flips else cut(path, draw.randrange(end))


def resumed(directory: Path, memory: list[Path]) -> tuple[Any, list[str]]:
    arena, state, manager = Arena(memory), dict[str, Any](), CheckpointManager(directory)
    with capture_logs() as logs:
        stored = StoredStates(manager, HeartbeatReporter(), arena.newest())
        restore(Control(), Control(), stored, dict, state.update, lambda origin: None)
    arena.close()
    return state, [line["event"] for line in logs]


def test_whatever_is_damaged_costs_one_state_and_no_data(tmp_path: Path) -> None:
    """A checkpoint's files or the agent's memory: the worker resumes the state before, and what is damaged is kept for
    inspection; undone, all is well again."""
    manager = CheckpointManager(tmp_path)
    states = {step: training_state(seed=step) for step in (1, 2, 3)}
    entry = [manager.save(states[step], SaveInfo(step, 1)).entry for step in (1, 2)][1]
    descriptors = [os.memfd_create(f"test-{number}") for number in range(SLOTS)]
    memory = [Path(f"/proc/self/fd/{each}") for each in descriptors]
    leave(arena := Arena(memory), manager, states[3], 3)
    arena.close()
    left = filled(memory)
    stored = [(path, [(0, path.stat().st_size)]) for path in sorted(entry.path.iterdir())]
    found = Counter[str]()
    for path, damaged in damages([*stored, (left, in_use(left))], random.Random(9)):
        with damaged:
            state, events = resumed(tmp_path, memory if path == left else [])
            assert same(state, states[2 if path == left else 1]), path
            found.update(set(events) & FOUND)
            for corrupt in tmp_path.glob("corrupt-*"):
                corrupt.rename(entry.path)
    assert found["checkpoint.quarantined"] + found["checkpoint.skipped"] == DAMAGES - DAMAGES // 4
    assert found.keys() == FOUND
    assert same(resumed(tmp_path, [])[0], states[2])
    assert same(resumed(tmp_path, memory)[0], states[3])
    for each in descriptors:
        os.close(each)
