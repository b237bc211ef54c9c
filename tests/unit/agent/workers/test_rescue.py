"""What agents commit when all workers of a job are dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.agent.workers.rescue import Rescue, survivors
from elastic_trainer.checkpoint import Arena, CheckpointManager, Owner, SaveInfo
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from tests.unit.checkpoint.states import training_state
from tests.unit.checkpoint.test_memory import leave


@pytest.fixture
def rescue() -> Rescue:
    return Rescue("a", lambda names, deadline: {}, workers=2)


def arena(rescue: Rescue) -> Arena:
    return Arena([Path(path) for path in rescue.paths.split(":")[:SLOTS]])


def saved_steps(directory: Path) -> list[int]:
    return [entry.step for entry in CheckpointManager(directory).entries()]


def test_what_no_storage_has_is_committed(rescue: Rescue, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, owner=Owner("run", "job"))
    manager.save(training_state(), SaveInfo(1, 1))
    leave(arena(rescue), manager, training_state(), 2)
    rescue.commit()
    rescue.commit()
    assert saved_steps(tmp_path) == [2, 1]
    assert manager.entries()[0].manifest.run == "run"
    leave(arena(rescue), manager, training_state(), 3)
    rescue.close()
    assert saved_steps(tmp_path) == [3, 2, 1]
    manager.close()


def test_a_node_that_leaves_by_agreement_commits_nothing(rescue: Rescue, tmp_path: Path) -> None:
    leave(arena(rescue), CheckpointManager(tmp_path), training_state(), 2)
    other = RoundMember(node="b", create_revision=10, life=1, first_rank=0, local_world_size=1)
    rescue.close(RoundDocument(number=3, nonce="n", state=RoundState.ACTIVE, members=(other,)))
    assert saved_steps(tmp_path) == []


def test_older_states_than_the_newest_checkpoint_are_left_alone(rescue: Rescue, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(training_state(), SaveInfo(5, 1))
    leave(arena(rescue), manager, training_state(), 4)
    rescue.close()
    assert saved_steps(tmp_path) == [5]


def test_a_storage_that_refuses_costs_nothing_else(rescue: Rescue, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    leave(arena(rescue), CheckpointManager(tmp_path / "file"), training_state(), 4)
    rescue.close()
    assert (tmp_path / "file").read_text() == "no directory"


def test_without_anything_in_memory_nothing_happens(rescue: Rescue) -> None:
    rescue.commit()
    rescue.close()


def view(node: str, life: int = 1, created: int = 10, state: NodeState = NodeState.READY) -> NodeView:
    record = NodeRecord(host=node, address=node, local_world_size=1, store_port=1, probe_port=1, life=life, state=state)
    return NodeView(node, created, 11, record)


def test_a_member_has_survived_whose_workers_are_those_of_the_round() -> None:
    """Not one whose workers are starting anew, nor one that came back as another."""
    members = tuple(
        RoundMember(node=name, create_revision=10, life=1, first_rank=rank, local_world_size=1)
        for rank, name in enumerate("abcde")
    )
    document = RoundDocument(number=3, nonce="n", state=RoundState.BROKEN, members=members)
    views = {
        "a": view("a"),
        "b": view("b", life=2),
        "c": view("c", created=12),
        "d": view("d", state=NodeState.WARMING),
        "f": view("f"),
    }
    assert survivors(document, views) == ["a"]
