"""Two places load one state, or none of it; here each holds all of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, Live, StateSnapshot
from elastic_trainer.checkpoint.storage import ByteSource
from elastic_trainer.checkpoint.storage.posix import PosixStorage
from elastic_trainer.errors import CheckpointError, RoundBrokenError
from elastic_trainer.worker.comm.abort import InterruptibleWaits
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.restore import Origin, StoredStates, restore
from tests.unit.checkpoint.states import descriptor_of
from tests.unit.worker.ranks import outcome, run_ranks
from tests.unit.worker.state.test_restore import damage, in_memory, saved

OLD, NEW = 3, 5


def restored(control: Control, directory: Path, left: StateSnapshot | None = None, **how: Any) -> tuple[Origin, float]:
    """What this rank has afterwards; ``fits`` and ``alike`` are those of the job."""
    state: dict[str, Any] = {"value": torch.full((1000,), -1.0)}

    def apply(tree: Mapping[str, Any]) -> None:
        state.update(tree)

    live = Live({"value": state["value"]}, fits=how.get("fits", lambda tree: True))
    stored = StoredStates(CheckpointManager(directory), HeartbeatReporter(), left, looks=control.rank == 0)
    alike = how.get("alike", Control(works=control.works))
    origin = restore(control, alike, stored, lambda: state, apply, lambda origin: None, live=live)
    assert bool((state["value"] == state["value"][0]).all())
    return origin, float(state["value"][0])


def broken(left: StateSnapshot) -> StateSnapshot:
    """One bit of it has changed in memory."""

    begin = left._begin("tensors.safetensors") + left.manifest.file("tensors.safetensors").size - 1
    (byte,) = os.pread(descriptor_of(left), 1, begin)
    os.pwrite(descriptor_of(left), bytes([byte ^ 1]), begin)
    return left


def test_where_a_state_in_memory_is_damaged_the_checkpoint_of_the_same_step_is_loaded(tmp_path: Path) -> None:
    """It was saved, too: nothing is lost."""
    saved(saved(tmp_path, OLD, 1), NEW, 1)
    entry, left = CheckpointManager(tmp_path).newest(), broken(in_memory(tmp_path, NEW, 1))
    assert entry is not None
    left = replace(left, manifest=left.manifest.model_copy(update={"name": entry.name}))
    found = run_ranks(2, lambda control: restored(control, tmp_path, left))
    assert [value for _, value in found] == [NEW, NEW]


class EndsTheRound(PosixStorage):
    """A peer dies while the tensors are read."""

    def __init__(self, directory: Path, works: InterruptibleWaits) -> None:
        super().__init__(directory)
        self._works = works

    def source(self, name: str, file: str) -> ByteSource:
        if file == "tensors.safetensors":
            self._works.end("a peer is gone")
        return super().source(name, file)


def test_what_is_read_when_the_round_breaks_is_read_no_further(tmp_path: Path) -> None:
    """The next round must not wait for slow storage; and nothing writes to the tensors any more."""
    works, tensor = InterruptibleWaits(interruptible=True), torch.full((1000,), -1.0)
    manager = CheckpointManager(tmp_path, storage=EndsTheRound(saved(tmp_path, NEW, 1), works))
    stored, live = StoredStates(manager, HeartbeatReporter()), Live({"value": tensor})
    with pytest.raises(RoundBrokenError, match="a peer is gone"):
        restore(Control(works=works), Control(), stored, dict, lambda tree: None, lambda origin: None, live=live)
    assert bool((tensor == -1.0).all())


def test_a_state_in_memory_is_loaded_though_storage_has_nothing_good(tmp_path: Path) -> None:
    """The only checkpoint was quarantined before."""
    saved(tmp_path, OLD, 1)
    damage(tmp_path, OLD)
    with pytest.raises(CheckpointError):
        CheckpointManager(tmp_path).load_newest()
    left = in_memory(tmp_path, NEW, 1)
    found = run_ranks(2, lambda control: restored(control, tmp_path, left))
    assert [value for _, value in found] == [NEW, NEW]


def test_a_checkpoint_of_another_job_is_no_reason_to_load_an_older_one(tmp_path: Path) -> None:
    """All ranks end with the reason, also where one alone has it, and no tensor has changed."""
    saved(saved(tmp_path, OLD, 1), NEW, 1)

    def body(control: Control) -> str:
        def fits(tree: dict[str, Any]) -> bool:
            if control.rank == 1 and tree["round"] == 1:
                raise CheckpointError("it is of another model")
            return True

        return outcome(lambda: restored(control, tmp_path, fits=fits))

    assert run_ranks(2, body) == [
        "CheckpointError: rank 1: it is of another model",
        "CheckpointError: it is of another model",
    ]


def test_what_was_half_read_is_trained_from_by_nobody(tmp_path: Path) -> None:
    """Of two checkpoints the newer is damaged: all have the older. Is that damaged too, all end."""
    saved(saved(tmp_path, OLD, 1), NEW, 1)
    damage(tmp_path, NEW)
    found = run_ranks(2, lambda control: restored(control, tmp_path))
    assert [value for _, value in found] == [OLD, OLD]
    damage(tmp_path, OLD)
    ends = run_ranks(2, lambda control: outcome(lambda: restored(control, tmp_path)))
    assert all("CheckpointError" in each for each in ends)
