"""Which state continues: one source job-wide, and equal bits on all ranks, whoever finds a checkpoint damaged."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from elastic_trainer.checkpoint import Arena, CheckpointManager, LoadInto, SaveInfo, StateSnapshot, commit, manifest
from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.checkpoint.memory import DATA, seal_as
from elastic_trainer.checkpoint.storage import ByteSource
from elastic_trainer.checkpoint.storage.posix import PosixSource, PosixStorage
from elastic_trainer.errors import CheckpointError, RoundBrokenError
from elastic_trainer.model import StateIdentity
from elastic_trainer.worker.comm.control import Control, InterruptibleWaits
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state import restore as transfer
from elastic_trainer.worker.state.restore import (
    Election,
    Origin,
    StoredStates,
    elect,
    elect_copies,
    restore,
    state_digest,
)
from tests.unit.checkpoint.states import descriptor_of, flipped, records
from tests.unit.worker.ranks import outcome, run_ranks

EARLIER, NEWER, LATER, OTHER = (StateIdentity(*each) for each in ((3, 7, "a"), (3, 8, "a"), (4, 1, "a"), (3, 8, "b")))


@pytest.mark.parametrize(
    ("states", "size", "elected"),
    [
        ([EARLIER, NEWER, None], 1, Election((1,), (0, 2))),
        ([NEWER, LATER, LATER], 1, Election((1,), (0,))),
        ([EARLIER, EARLIER, NEWER, NEWER], 2, Election((2, 3), (0, 1))),
        ([NEWER, EARLIER, EARLIER, NEWER], 2, Election((0, 3), (1, 2))),
        ([None, None, NEWER, NEWER, NEWER, NEWER], 2, Election((2, 3), (0, 1))),
        ([EARLIER, EARLIER, NEWER, None], 2, Election((0, 1), (2, 3))),
        ([OTHER, NEWER, NEWER], 1, Election((1,), (0,))),
        ([NEWER, OTHER], 1, Election((0,), (1,))),
        ([OTHER, EARLIER, EARLIER, None], 1, Election((0,), (1, 2, 3))),
        ([OTHER, NEWER, NEWER, OTHER, NEWER, NEWER], 2, Election((2, 1), (0, 3))),
        ([None, None], 1, None),
        ([EARLIER, NEWER], 2, None),
        ([NEWER, None, NEWER, None], 2, None),
    ],
    ids=[
        "newest", "a round beats a step", "of both shards", "wherever", "newcomers", "newer but incomplete",
        "most common", "a tie", "one alone is newest", "most common of each shard", "nobody", "torn", "half",
    ],
)  # fmt: skip
def test_the_newest_complete_state_of_most_ranks_continues(
    states: list[StateIdentity | None], size: int, elected: Election | None
) -> None:
    assert elect(states, size) == elected


def test_the_newest_state_of_which_all_shards_are_in_memory_is_chosen() -> None:
    """Each copy is read from the first rank that has it; one of another number of shards is no part of it."""
    own = [[(1, 7, 0, 3), (1, 8, 0, 3)], [(1, 7, 1, 3), (1, 7, 2, 3)], [(1, 8, 1, 2), (1, 7, 2, 3)]]
    assert elect_copies(own) == {(1, 7, 0, 3): 0, (1, 7, 1, 3): 1, (1, 7, 2, 3): 1}
    assert elect_copies([*own, [(1, 8, 1, 3), (1, 8, 2, 3)]]) == {(1, 8, 0, 3): 0, (1, 8, 1, 3): 3, (1, 8, 2, 3): 3}
    assert elect_copies([*own, [(2, 3, 0, 2), (2, 3, 1, 2)]]) == {(2, 3, 0, 2): 3, (2, 3, 1, 2): 3}
    assert elect_copies([[(1, 7, 0, 3)], [(1, 7, 1, 3)], []]) == {}


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
    snapshots = left or {}

    def body(control: Control) -> tuple[Origin, float]:
        return Rank(control, directories[control.rank]).restored(snapshots.get(control.rank))

    return run_ranks(len(directories), body)


def in_memory(directory: Path, step: int, round: int) -> StateSnapshot:
    manager, arena, info = CheckpointManager(directory), Arena(), SaveInfo(step, round, fields={"length": step})
    held = arena.hold(manager.encode({"value": torch.full((1000,), float(step)), "round": round}, info))
    manifest = manager.draft(info).with_files(records(held.image))
    seal_as(arena.descriptor(held), manifest, manager.location, None)
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


def test_the_newest_whole_checkpoint_of_any_node_reaches_all_ranks(tmp_path: Path) -> None:
    """Rank 1's node has a later round, rank 2's a higher step of an older one. With that of rank 1 damaged, another
    node's becomes the source, and the damaged one is quarantined."""
    nodes = [saved(tmp_path / "a", 10, 1), saved(tmp_path / "b", 11, 2), saved(tmp_path / "c", 99, 1)]
    saved(nodes[1], 7, 1)
    for wanted, corrupt in ((11, 0), (99, 1)):
        results = everywhere(list(nodes))
        assert {value for _, value in results} == {wanted}
        assert len({origin.name for origin, _ in results}) == 1
        assert results[0][0].fields == {"length": wanted}
        assert len(list(nodes[1].glob("corrupt-*"))) == corrupt
        if not corrupt:
            damage(nodes[1], 11)


def test_checkpoints_of_which_none_is_good_stop_the_job(tmp_path: Path) -> None:
    """Starting from scratch must be somebody's decision; all ranks say so."""
    damage(saved(tmp_path, 20, 1), 20)

    def body(control: Control) -> str:
        return outcome(Rank(control, tmp_path if control.rank == 1 else None).restored)

    first, second = run_ranks(2, body)
    assert first.startswith("CheckpointError: rank 1: no checkpoint in")
    assert second.startswith("CheckpointError: no checkpoint in")


def test_ranks_that_differ_after_resuming_are_found(tmp_path: Path) -> None:
    """A registered part that does not restore what it gave would make ranks drift apart."""
    saved(tmp_path, 5, 1)

    def body(control: Control) -> str:
        rank = Rank(control, tmp_path if control.rank == 0 else None)
        take = rank.apply
        rank.apply = lambda tree: take({**tree, "extra": control.rank == 1})  # type: ignore[method-assign]
        return outcome(rank.restored)

    assert all("rank 1 holds another state than rank 0" in text for text in run_ranks(3, body))


def test_a_state_of_many_sizes_arrives_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
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
        takes = control.rank != 2
        got = transfer.transfer(control, 2, lambda: state, takes=takes)
        return fingerprint(got if takes else state), got

    results = run_ranks(3, body)
    assert {number for number, _ in results} == {fingerprint(state)}
    assert torch.equal(results[0][1]["half"], state["half"])  # type: ignore[arg-type]
    assert torch.equal(results[0][1]["a"], state["a"])  # type: ignore[arg-type]


def test_what_all_ranks_have_in_memory_each_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though storage has nothing good."""
    damage(saved(tmp_path, 3, 1), 3)
    monkeypatch.setattr(transfer, "pass_on", lambda *_: pytest.fail("it was sent"))
    left = in_memory(tmp_path, 5, 1)
    assert [value for _, value in everywhere([tmp_path] * 3, dict.fromkeys(range(3), left))] == [5.0] * 3


# ---- shards: here each of two ranks needs all of a state, and gets it from nobody else

OLD, NEW = 3, 5


def restored(control: Control, directory: Path, fits: Callable[[Any], bool] = lambda tree: True) -> float:
    """What this rank, which alone holds its shard, has afterwards; ``fits`` is that of the job."""
    rank = Rank(control, directory)
    live = LoadInto({"value": rank.state["value"]}, fits=fits)
    stored = StoredStates(rank.manager, HeartbeatReporter(), looks=control.rank == 0)
    restore(control, Control(), stored, lambda: rank.state, rank.apply, lambda origin: None, live=live)
    assert bool((rank.state["value"] == rank.state["value"][0]).all())
    return float(rank.state["value"][0])


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
    assert found == [OLD, OLD]
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
    assert found == [OLD, OLD]
    shutil.rmtree(nodes[1])
    ends = run_ranks(2, lambda control: outcome(lambda: restored(control, nodes[control.rank])))
    assert all("not all shards of step-000000003-" in each for each in ends)


CHUNK = 4096


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a few hundred KB has as many parts as a large one."""
    for module, name in ((manifest, "CHUNK"), (manifest, "PIECE"), (commit, "CHUNK")):
        monkeypatch.setattr(module, name, CHUNK)


def large_state(seed: int = 0) -> dict[str, Any]:
    """Tensors that parts cut anywhere; strided ones, which take a way round; those of no and of one element."""
    made = torch.Generator().manual_seed(seed)
    many = {f"t{index}": torch.randn(17 * index, generator=made) for index in range(60)}
    return {
        "model": many | {"strided": torch.randn(300, 100, generator=made).t(), "half": torch.randn(5001).bfloat16()},
        "step": torch.tensor(float(seed)),
        "raw": b"bytes" * 3000,
    }


class LargeRank(Rank):
    """Its live tensors have other values than those that are stored."""

    def __init__(self, control: Control, directory: Path | None) -> None:
        super().__init__(control, directory)
        self.tensors = large_state(seed=100 + control.rank)["model"]
        self.state = {"model": self.tensors, "random": control.rank}

    def live(self) -> LoadInto:
        return LoadInto({"model": self.tensors})


def all_load(directories: list[Path | None]) -> list[tuple[Origin, dict[str, Any]]]:
    def body(control: Control) -> tuple[Origin, dict[str, Any]]:
        rank = LargeRank(control, directories[control.rank])
        origin = rank.loaded()
        for name, tensor in rank.tensors.items():
            assert rank.state["model"][name] is tensor, f"{name} was not read into the live tensor"
        return origin, rank.state

    return run_ranks(len(directories), body)


def kept(directory: Path, step: int, parts: int = 1) -> dict[str, Any]:
    manager, info = CheckpointManager(directory), SaveInfo(step, 1)
    state = large_state(step)
    manager.commit(manager.encode(state, info, parts=parts), manager.draft(info))
    return state


def equal(results: list[tuple[Origin, dict[str, Any]]], state: Mapping[str, Any]) -> bool:
    return all(state_digest(found) == state_digest(dict(state)) for _, found in results)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("seeing", [1, 2, 4], ids=lambda count: f"{count}_of_4_see_it")
def test_what_all_load_together_is_what_was_saved_in_the_tensors_that_were_there(
    tmp_path: Path, seeing: int, parts: int
) -> None:
    """With one reader and with several, which read in turns."""
    state = kept(tmp_path / "a", 7, parts=parts)
    with capture_logs() as logs:
        assert equal(all_load([tmp_path / "a"] * seeing + [None] * (4 - seeing)), state)
    assert [line["readers"] for line in logs if line["event"] == "checkpoint.loaded"] == [seeing]


@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_one_rank_finds_damaged_makes_all_choose_again(tmp_path: Path) -> None:
    """Its node's copy alone is damaged: the others' is loaded. All see the damaged one: the one before it is."""
    before, state = kept(tmp_path / "a", 6), kept(tmp_path / "a", 7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    damage(tmp_path / "b", 7)
    results = all_load([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert equal(results, state)
    assert [len(list(node.glob("corrupt-*"))) for node in (tmp_path / "a", tmp_path / "b")] == [0, 1]
    damage(tmp_path / "a", 7)
    assert equal(all_load([tmp_path / "a"] * 3), before)
    assert len(list((tmp_path / "a").glob("corrupt-*"))) == 1


@pytest.mark.usefixtures("small_chunks")
def test_a_part_that_one_rank_cannot_read_now_is_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is quarantined; a rank that cannot read at all still gets the state."""
    state = kept(tmp_path / "a", 7)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    reading = PosixSource.read_into

    def failing(source: PosixSource, buffer: memoryview, offset: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{source._descriptor}")
        if "/b/" in path and "tensors" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return reading(source, buffer, offset)

    monkeypatch.setattr(PosixSource, "read_into", failing)
    for directories in (["a", "b", "a"], ["b", "a", "b"]):
        assert equal(all_load([tmp_path / name for name in directories]), state)
    assert not [*tmp_path.glob("*/corrupt-*")]
