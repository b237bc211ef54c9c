"""Two agents hold one step with different buffers, and storage is slow: what is rescued has one source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from elastic_trainer.agent.workers import rescue as rescue_module
from elastic_trainer.agent.workers.rescue import Rescue
from elastic_trainer.checkpoint import Arena, CheckpointManager, Owner
from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.checkpoint.storage.posix import PosixStorage
from elastic_trainer.clock import pause
from elastic_trainer.errors import StorageError
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from tests.support.waiting import eventually
from tests.unit.agent.workers.test_rescue import view
from tests.unit.checkpoint.test_memory import leave

LIMIT_S = 60.0
NODES = ("a", "b")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Rescue]]:
    """Each holds step 7, with a running mean of its own: 0 on node a, 1 on node b."""
    agents = [Rescue(node, lambda names, deadline: {name: view(name) for name in names}, workers=1) for node in NODES]
    for number, each in enumerate(agents):
        arena = Arena([Path(path) for path in each.paths.split(":")[:SLOTS]])
        state = {"model": {"running_mean": torch.full((1000,), float(number))}}
        leave(arena, CheckpointManager(tmp_path, owner=Owner("run", "job")), state, 7)
    yield agents
    for each in agents:
        each.close()


def rescued_from(directory: Path) -> list[int]:
    manager = CheckpointManager(directory)
    return [int(manager.load(each).state["model"]["running_mean"][0]) for each in manager.entries()]


def document() -> RoundDocument:
    members = tuple(
        RoundMember(node=name, create_revision=10, life=1, first_rank=rank, local_world_size=1)
        for rank, name in enumerate(NODES)
    )
    return RoundDocument(number=3, nonce="n", state=RoundState.BROKEN, members=members)


def stuck_at_publishing(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> tuple[threading.Event, ...]:
    """Node a's commit stands still before it publishes, until the second event; then ``then``."""
    reached, goes_on = threading.Event(), threading.Event()
    real = PosixStorage.publish

    def publish(storage: PosixStorage, temporary: str, name: str) -> None:
        if not reached.is_set():
            reached.set()
            assert goes_on.wait(LIMIT_S)
            then()
        real(storage, temporary, name)

    monkeypatch.setattr(PosixStorage, "publish", publish)
    return reached, goes_on


def full() -> None:
    raise StorageError("the disk is full")


@pytest.mark.parametrize(("then", "source"), [(lambda: None, 0), (full, 1)], ids=["slow", "slow and then full"])
def test_an_agent_leaves_the_state_to_the_one_that_is_writing_it(
    agents: list[Rescue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None], source: int
) -> None:
    """Rank 0's agent needs longer than the others wait before they look; if it fails after all, the next one writes."""
    monkeypatch.setattr(rescue_module, "APART_S", 0.1)
    reached, goes_on = stuck_at_publishing(monkeypatch, then)
    with capture_logs() as logs:
        for each in agents:
            each.begin(document(), in_place=False)
            assert reached.wait(LIMIT_S)
        pause(1.0)
        assert rescued_from(tmp_path) == []
        goes_on.set()
        eventually(lambda: "snapshot-rescue" not in [each.name for each in threading.enumerate()], "a rescue goes on")
    assert rescued_from(tmp_path) == [source]
    assert [line["event"] for line in logs if line["event"] == "snapshot.rescued"] == ["snapshot.rescued"]


def test_a_node_that_leaves_amid_a_long_rescue_says_so_and_keeps_the_memory_that_is_written(
    agents: list[Rescue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue_module, "LEAVING_S", 0.1)
    reached, goes_on = stuck_at_publishing(monkeypatch, lambda: None)
    with capture_logs() as logs:
        agents[0].begin(document(), in_place=False)
        assert reached.wait(LIMIT_S)
        agents[0].close()
        assert [line["event"] for line in logs] == ["snapshot.not_rescued"]
        assert agents[0].paths, "the memory is freed"
        goes_on.set()
        eventually(lambda: "snapshot-rescue" not in [each.name for each in threading.enumerate()], "a rescue goes on")
    assert rescued_from(tmp_path) == [0]
