"""A request for a save goes to rank 0's worker, and its answer back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.health.node_health import SaveRequests
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import RoundState, SaveRequest
from elastic_trainer.store.api import EventKind, Put, RunKeys, Watch, WatchEvent, WatchListener
from tests.support.memory_store import MemoryStore
from tests.unit.agent.readings import reading, round_of

KEYS = RunKeys("/p", "run")


class Quiet(MemoryStore):
    """A store whose watch says something only when the test does."""

    following = 0

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        assert (prefix, exact) == (KEYS.save, True)
        self.following += 1
        return self  # which closes what it has opened

    def close(self) -> None:
        self.following -= 1


class Scene:
    """The agent of node ``a``, which has rank 0 in round 1, and its worker."""

    def __init__(self, directory: Path) -> None:
        self.store, self.directory = Quiet(), directory
        self.requests = SaveRequests(self.store, KEYS, "a")
        self.requests.turn(round_of(1, "a", "b"))

    def put(self, request: SaveRequest) -> None:
        """Somebody writes the key, and the watch shows it."""
        self.store.transact([], [Put(KEYS.save, request.encode())], deadline=Deadline.after(1.0))
        self.receive()

    def receive(self) -> None:
        (item,) = self.store.get(KEYS.save, Deadline.after(1.0)).items
        self.requests.on_events([WatchEvent(EventKind.PUT, item)])

    def worker(self, pid: int = 7, **notes: Any) -> Reading:
        return replace(reading(pid=pid, notes=notes), path=self.directory / f"0-{pid}.page")

    def passed_on(self, pid: int = 7) -> str | None:
        path = self.directory / f"0-{pid}.save"
        return path.read_text() if path.exists() else None

    @property
    def stored(self) -> SaveRequest:
        (item,) = self.store.get(KEYS.save, Deadline.after(1.0)).items
        return SaveRequest.decode(item.value, item.key)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_request_is_passed_on_and_answered_once(scene: Scene) -> None:
    """The answer hurries the writer once, however often it is seen."""
    scene.put(SaveRequest(id="x", wall=1.0))
    assert not scene.requests.look([scene.worker()])
    assert scene.passed_on() == "x"
    scene.requests.turn(round_of(1, "a", "b"))
    assert not scene.stored.answered
    assert not scene.requests.look([scene.worker(on_demand={"id": "an older one", "name": "step-1"})])
    done = scene.worker(on_demand={"id": "x", "name": "step-5"})
    assert [scene.requests.look([done]) for _ in range(3)] == [True, False, False]
    scene.requests.turn(round_of(1, "a", "b"))
    assert scene.stored == SaveRequest(id="x", wall=1.0, name="step-5")
    scene.receive()
    assert not scene.requests.look([done])
    scene.requests.turn(round_of(1, "a", "b"))
    assert scene.stored.name == "step-5"


def test_a_worker_that_has_taken_its_request_does_not_get_it_again(scene: Scene) -> None:
    """However often the agent looks while the worker saves."""
    scene.put(SaveRequest(id="x", wall=1.0))
    scene.requests.look([scene.worker()])
    (scene.directory / "0-7.save").unlink()
    scene.requests.look([scene.worker()])
    assert scene.passed_on() is None
    scene.put(SaveRequest(id="y", wall=2.0))
    scene.requests.look([scene.worker()])
    assert scene.passed_on() == "y"


def test_the_worker_that_follows_on_a_dead_one_gets_the_request_too(scene: Scene) -> None:
    """Nobody has answered it yet; a rank that is not 0 gets none."""
    scene.put(SaveRequest(id="x", wall=1.0))
    scene.requests.look([scene.worker(7)])
    scene.requests.look([])
    scene.requests.look([scene.worker(8)])
    assert scene.passed_on(8) == "x"
    other = replace(reading(pid=9, rank=1), path=scene.directory / "0-9.page")
    scene.requests.look([other])
    assert scene.passed_on(9) is None


def test_a_refusal_is_an_answer_and_waits_for_the_store(scene: Scene) -> None:
    """The outage is over at a later turn."""
    scene.put(SaveRequest(id="x", wall=1.0))
    assert scene.requests.look([scene.worker(on_demand={"id": "x", "name": "", "problem": "disk full", "code": 73})])
    scene.store.backend.down = True
    with pytest.raises(StoreUnavailableError):
        scene.requests.turn(round_of(1, "a", "b"))
    scene.store.backend.down = False
    assert not scene.stored.answered
    scene.requests.turn(round_of(1, "a", "b"))
    assert (scene.stored.problem, scene.stored.code) == ("disk full", 73)


def test_only_the_node_of_rank_0_follows_requests(scene: Scene) -> None:
    """And only while the run is on; what is no request is refused."""
    for document, following in (
        (round_of(2, "b", "a"), 0),
        (round_of(3, "a", "b"), 1),
        (round_of(3, "a", "b", state=RoundState.BROKEN), 1),
        (round_of(3, "a", "b", state=RoundState.CLOSED), 0),
        (None, 0),
    ):
        scene.requests.turn(document)
        assert scene.store.following == following
    scene.requests.turn(round_of(4, "a"))
    scene.store.transact([], [Put(KEYS.save, b"{]")], deadline=Deadline.after(1.0))
    scene.receive()
    assert not scene.requests.look([scene.worker()])
    assert scene.passed_on() is None
