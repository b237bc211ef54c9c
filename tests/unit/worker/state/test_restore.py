"""One source job-wide, and equal states on all ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import Arena, CheckpointManager, LoadInto, SaveInfo, StateSnapshot
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.checkpoint.manifest import records
from elastic_trainer.checkpoint.memory import DATA
from elastic_trainer.checkpoint.storage import ByteSource
from elastic_trainer.checkpoint.storage.posix import PosixStorage
from elastic_trainer.errors import CheckpointError, RoundBrokenError
from elastic_trainer.worker.comm.abort import InterruptibleWaits
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state import restore as transfer
from elastic_trainer.worker.state.restore import Origin, StoredStates, restore
from tests.unit.checkpoint.states import descriptor_of, flipped
from tests.unit.worker.ranks import outcome, run_ranks


def saved(directory: Path, step: int, round: int) -> Path:
    manager = CheckpointManager(directory)
    state = {"value": torch.full((1000,), float(step)), "round": round}
    manager.save(state, SaveInfo(step, round, fields={"length": step}))
    return directory


class Rank:
    """A rank's state, and what a node's storage says."""

    def __init__(self, control: Control, directory: Path | None) -> None:
        self.state: dict[str, Any] = {"value": torch.full((1000,), -1.0 - control.rank), "random": control.rank}
        self.manager = CheckpointManager(directory) if directory is not None else None
        self.control = control

    def apply(self, tree: Mapping[str, Any]) -> None:
        self.state = {**tree, "random": self.control.rank}

    def live(self) -> LoadInto:
        return LoadInto({"value": self.state["value"]})

    def loaded(self, left: StateSnapshot | None = None) -> Origin:
        return restore(
            self.control,
            self.control,
            StoredStates(self.manager, HeartbeatReporter(), left),
            lambda: self.state,
            self.apply,
            lambda origin: None,
            live=self.live(),
        )

    def restored(self, left: StateSnapshot | None = None) -> tuple[Origin, float]:
        origin = self.loaded(left)
        return origin, float(self.state["value"][0])


def everywhere(
    directories: list[Path | None], left: Mapping[int, StateSnapshot] | None = None
) -> list[tuple[Origin, float]]:
    """``left``: the snapshots in the memory of some ranks' nodes."""
    snapshots = left or {}

    def body(control: Control) -> tuple[Origin, float]:
        return Rank(control, directories[control.rank]).restored(snapshots.get(control.rank))

    return run_ranks(len(directories), body)


def in_memory(directory: Path, step: int, round: int) -> StateSnapshot:
    """What a worker that is gone has left."""
    manager, arena, info = CheckpointManager(directory), Arena(), SaveInfo(step, round, fields={"length": step})
    held = arena.hold(manager.encode({"value": torch.full((1000,), float(step)), "round": round}, info))
    manifest = manager.draft(info).with_files(records(held.image))
    arena.seal(held, manifest, manager.location, None)
    found = arena.newest()
    assert found is not None
    return found


def damage(directory: Path, step: int) -> None:
    (path,) = directory.glob(f"step-{step:09d}-*/tensors.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("left", "wanted"),
    [((5, 1), 5.0), ((4, 2), 4.0), ((3, 1), 3.0), ((9, 0), 3.0)],
    ids=["newer", "round", "tie", "old"],
)
def test_a_state_in_memory_counts_by_its_age(tmp_path: Path, left: tuple[int, int], wanted: float) -> None:
    """On any node, with or without a checkpoint in its storage; of two that are equally old memory is quicker."""
    saved(tmp_path / "a", 3, 1)
    (tmp_path / "b").mkdir()
    results = everywhere([tmp_path / "a", tmp_path / "b", None], {1: in_memory(tmp_path / "b", *left)})
    assert [value for _, value in results] == [wanted] * 3
    assert {origin.stored for origin, _ in results} == {left[1] == 0 or left == (3, 1)}
    results = everywhere([tmp_path / "a", None], {0: in_memory(tmp_path / "a", *left)})
    assert [(value, origin.stored) for origin, value in results] == [(wanted, left[1] == 0)] * 2


def test_a_damaged_state_in_memory_counts_for_nothing(tmp_path: Path) -> None:
    """Neither where there is a checkpoint, nor where there is none."""
    saved(tmp_path / "a", 3, 1)
    for directory, wanted in ((tmp_path / "a", 3.0), (tmp_path / "none", -1.0)):
        left = in_memory(directory, 5, 1)
        with flipped(Path(f"/proc/self/fd/{descriptor_of(left)}"), 8 * (DATA + 2000)):
            assert [value for _, value in everywhere([directory, None], {0: left})] == [wanted] * 2


def test_a_state_in_memory_is_better_than_an_older_checkpoint_behind_a_damaged_one(tmp_path: Path) -> None:
    saved(tmp_path, 3, 1)
    saved(tmp_path, 9, 1)
    damage(tmp_path, 9)
    assert [value for _, value in everywhere([tmp_path, None], {0: in_memory(tmp_path, 5, 1)})] == [5.0] * 2


def test_a_fresh_job_begins_with_rank_0s_state_everywhere(tmp_path: Path) -> None:
    """Different initial states are made equal by the same path that resumes."""
    results = everywhere([tmp_path, None, None])
    assert results == [(Origin(), -1.0)] * 3


def test_the_newest_checkpoint_of_any_node_reaches_all_ranks(tmp_path: Path) -> None:
    """Rank 1's node has a later round, rank 2's a higher step of an older one."""
    nodes = [saved(tmp_path / "a", 10, 1), saved(tmp_path / "b", 11, 2), saved(tmp_path / "c", 99, 1)]
    results = everywhere(list(nodes))
    assert {value for _, value in results} == {11.0}
    assert len({origin.name for origin, _ in results}) == 1
    assert results[0][0].fields == {"length": 11}


def test_a_damaged_checkpoint_makes_the_choice_fall_on_the_next_one_of_all_nodes(tmp_path: Path) -> None:
    """Its own node has only an older one, so another node's becomes the source; the damaged one is quarantined."""
    first, second = saved(tmp_path / "a", 20, 1), saved(tmp_path / "b", 15, 1)
    saved(first, 10, 1)
    damage(first, 20)
    results = everywhere([first, second])
    assert [value for _, value in results] == [15.0, 15.0]
    assert list(first.glob("corrupt-*"))


def test_checkpoints_of_which_none_is_good_stop_the_job(tmp_path: Path) -> None:
    """Starting from scratch must be somebody's decision; all ranks say so."""
    damage(saved(tmp_path, 20, 1), 20)

    def body(control: Control) -> str:
        return outcome(Rank(control, tmp_path if control.rank == 1 else None).restored)

    first, second = run_ranks(2, body)
    assert first.startswith("CheckpointError: rank 1: no checkpoint in")
    assert second.startswith("CheckpointError: no checkpoint in")


def test_a_state_that_one_rank_refuses_stops_all(tmp_path: Path) -> None:
    """No rank trains on alone."""
    saved(tmp_path, 5, 1)

    def body(control: Control) -> str:
        rank = Rank(control, tmp_path if control.rank == 0 else None)
        if control.rank == 2:
            rank.apply = lambda tree: (_ for _ in ()).throw(CheckpointError("does not fit"))  # type: ignore[method-assign]
        return outcome(rank.restored)

    assert run_ranks(3, body) == ["CheckpointError: rank 2: does not fit"] * 2 + ["CheckpointError: does not fit"]


def test_ranks_that_differ_after_resuming_are_found(tmp_path: Path) -> None:
    """A registered part that does not restore what it gave would make ranks drift apart."""
    saved(tmp_path, 5, 1)

    def body(control: Control) -> str:
        rank = Rank(control, tmp_path if control.rank == 0 else None)
        take = rank.apply
        rank.apply = lambda tree: take({**tree, "extra": control.rank == 1})  # type: ignore[method-assign]
        return outcome(rank.restored)

    assert all("rank 1 holds another state than rank 0" in text for text in run_ranks(3, body))


@pytest.mark.parametrize("world", [2, 3])
def test_a_state_of_many_sizes_arrives_bit_by_bit(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end anywhere inside tensors; empty, scalar and shared tensors included."""
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    shared = torch.arange(10, dtype=torch.int64)
    state = {
        "a": torch.randn(333),
        "b": [torch.zeros(0), torch.tensor(3.5, dtype=torch.float64), shared, shared],
        "c": {"flag": torch.tensor([True, False]), 7: b"raw" * 3000, "nan": float("nan")},
        "half": torch.randn(501).bfloat16(),
    }

    def body(control: Control) -> tuple[int, dict[str, Any]]:
        takes = control.rank != world - 1
        got = transfer.transfer(control, world - 1, lambda: state, takes=takes)
        return fingerprint(got if takes else state), got

    results = run_ranks(world, body)
    assert {number for number, _ in results} == {fingerprint(state)}
    assert torch.equal(results[0][1]["half"], state["half"])  # type: ignore[arg-type]
    assert torch.equal(results[0][1]["a"], state["a"])  # type: ignore[arg-type]


def test_a_state_that_cannot_be_kept_is_refused_on_all_ranks() -> None:
    """Before anything is sent, so that no rank waits for it."""

    def body(control: Control) -> str:
        return outcome(lambda: transfer.transfer(control, 0, lambda: {"x": object()}))

    first, second = run_ranks(2, body)
    assert "cannot save state['x']" in first
    assert second.startswith("CheckpointError: rank 0: cannot save state['x']")


def test_what_all_ranks_have_in_memory_each_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is slower than that."""
    saved(tmp_path, 3, 1)
    monkeypatch.setattr(transfer, "pass_on", lambda *_: pytest.fail("it was sent"))
    left = in_memory(tmp_path, 5, 1)
    assert [value for _, value in everywhere([tmp_path] * 3, dict.fromkeys(range(3), left))] == [5.0] * 3


# ---- shards: here each of two ranks needs all of a state, and gets it from nobody else

OLD, NEW = 3, 5


def restored(control: Control, directory: Path, left: StateSnapshot | None = None, **how: Any) -> tuple[Origin, float]:
    """What this rank, which alone holds its shard, has afterwards; ``fits`` is that of the job."""
    rank = Rank(control, directory)
    live = LoadInto({"value": rank.state["value"]}, fits=how.get("fits", lambda tree: True))
    stored = StoredStates(rank.manager, HeartbeatReporter(), left, looks=control.rank == 0)
    origin = restore(control, Control(), stored, lambda: rank.state, rank.apply, lambda origin: None, live=live)
    assert bool((rank.state["value"] == rank.state["value"][0]).all())
    return origin, float(rank.state["value"][0])


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
    stored, live = StoredStates(manager, HeartbeatReporter()), LoadInto({"value": tensor})
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


def test_a_state_of_which_one_rank_cannot_read_its_shard_is_passed_over_by_all(tmp_path: Path) -> None:
    """Its storage lacks it. Is there no other that all can read, the job ends, and says which one it was."""
    nodes = [saved(tmp_path / name, OLD, 1) for name in "ab"]
    for entry in nodes[0].iterdir():
        shutil.rmtree(entry)
    shutil.copytree(nodes[1], nodes[0], dirs_exist_ok=True)
    saved(nodes[0], NEW, 1)
    found = run_ranks(2, lambda control: restored(control, nodes[control.rank]))
    assert [value for _, value in found] == [OLD, OLD]
    shutil.rmtree(nodes[1])
    ends = run_ranks(2, lambda control: outcome(lambda: restored(control, nodes[control.rank])))
    assert all("not all shards of step-000000003-" in each for each in ends)
