"""Who cannot be reached, and how long a node keeps away because of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from elastic_trainer.agent.workers import quarantine as quarantines
from elastic_trainer.agent.workers import reachability as contacts
from elastic_trainer.agent.workers.reachability import Reachability, reaches, records_of
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.ipc.messages import Failed, Formation, Over
from elastic_trainer.membership.documents import Ghost, NodeRecord, NodeState, RoundState
from elastic_trainer.store.api import Put, Store
from elastic_trainer.store.keys import RunKeys
from tests.support.crew import eventually
from tests.support.memory_backend import MemoryBackend
from tests.support.memory_store import MemoryStore
from tests.unit.agent.channel import BASE, OTHER, Notebook, Stage, Worker, conductor_of

KEYS = RunKeys("/elastic_trainer", "run")


def record(address: str, port: int = 1) -> NodeRecord:
    return BASE.model_copy(update={"address": address, "probe_port": port})


def test_an_answer_of_any_kind_means_that_a_host_is_reached() -> None:
    """Somebody listens, or the kernel refuses: both come from there. Nothing comes from a host that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reaches("127.0.0.1", port)
    assert reaches("127.0.0.1", port)
    assert not reaches("a-host-of-this-name.invalid", port)


def test_those_that_do_not_answer_are_missing() -> None:
    """In the order asked for; a node without a key, or without a port, is not missing."""
    records = {"a": record("10.0.0.1"), "b": record("10.0.0.2"), "c": record("10.0.0.3"), "d": record("10.0.0.4", 0)}
    contact = Reachability(lambda: records, lambda host, port: host == "10.0.0.2")
    assert contact.missing(["c", "b", "a", "d", "x"]) == ("c", "a")
    assert contact.missing([]) == ()


def test_a_crowd_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that reaches nobody of a thousand says so soon, by those it could try; the rest is not accused."""
    monkeypatch.setattr(contacts, "LIMIT_S", 0.2)
    names = [f"n{number}" for number in range(1000)]
    enough = threading.Event()

    def nobody(host: str, port: int) -> bool:
        enough.wait(0.05)
        return False

    found = Reachability(lambda: {name: record("10.0.0.1") for name in names}, nobody).missing(names)
    assert found is not None
    assert len(found) < len(names)


def test_records_are_read_from_the_store() -> None:
    """Those of the run's nodes, by name."""
    store: Store = MemoryStore(MemoryBackend())
    store.transact([], [Put(KEYS.node("a"), record("10.0.0.1").encode())], deadline=Deadline.after(5.0))
    assert {name: each.address for name, each in records_of(store, KEYS).items()} == {"a": "10.0.0.1"}


def test_without_the_store_nobody_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be found out is no accusation."""
    store = MemoryStore(MemoryBackend())

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailableError("no store")

    monkeypatch.setattr(store, "range", away)
    assert Reachability(lambda: records_of(store, KEYS)).missing(["a"]) is None


class Network:
    """Which nodes can be reached."""

    def __init__(self) -> None:
        self.cut: set[str] = {"other"}
        self.asked: list[str] = []
        self.store = True
        self.looks = 0
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens, once, while somebody is tried."""

    def records(self) -> dict[str, NodeRecord]:
        self.looks += 1
        return {"other": record("other"), "me": record("me")} if self.store else {}

    def reaches(self, host: str, port: int) -> bool:
        self.asked.append(host)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return host not in self.cut


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def stage(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A node that does not reach the other one, and looks again soon."""
    monkeypatch.setattr(quarantines, "SHORTEST_S", 0.05)
    notebook = Notebook()
    contact = Reachability(network.records, network.reaches)
    conductor = conductor_of(notebook, lambda progress: None, lambda pid: None, contact)
    try:
        yield Stage(conductor, notebook)
    finally:
        conductor.close()


def failed_forming(stage: Stage, number: int, stalled: int) -> Worker:
    """A worker that could not form round ``number``, and is free for the next."""
    worker = in_round(stage, number, stalled=stalled)
    worker.say(Failed(number=number, error="gloo: timed out", forming=True))
    stage.await_break()
    stage.see(number, RoundState.BROKEN, stalled=stalled)
    worker.await_one(Over)
    worker.ready(number + 1)
    return worker


def test_the_second_form_that_fails_makes_a_node_name_whom_it_does_not_reach(stage: Stage) -> None:
    """The names are in the record that says that its workers are free: the next round is decided by them."""
    failed_forming(stage, 4, stalled=1)
    assert stage.await_record(reported=5).unreachable == ("other",)


def test_the_first_form_that_fails_accuses_nobody(stage: Stage) -> None:
    """A peer may have died."""
    failed_forming(stage, 4, stalled=0)
    assert stage.await_record(reported=5).unreachable == ()


def test_a_node_that_others_did_not_reach_looks_whom_it_reaches_itself(stage: Stage, network: Network) -> None:
    """Before it says that it is free: two nodes that name each other are not put into one round again."""
    worker = in_round(stage, 4)
    stage.see(4, RoundState.BROKEN, ghosts=(Ghost(node="me", mod_revision=3),))
    assert stage.await_record(acknowledged=5, reported=4).unreachable == ()
    worker.await_one(Over)
    worker.ready(5)
    assert stage.await_record(reported=5).unreachable == ("other",)


def test_a_node_looks_again_whom_it_reaches_while_the_round_is_over(stage: Stage, network: Network) -> None:
    """No other is formed while two that are needed name each other."""
    worker = in_round(stage, 4)
    stage.see(4, RoundState.BROKEN, ghosts=(Ghost(node="me", mod_revision=3),))
    worker.await_one(Over)
    worker.ready(5)
    stage.await_record(reported=5, unreachable=("other",))
    network.cut.clear()
    stage.await_record(reported=5, unreachable=())


def test_a_node_that_is_left_out_while_it_looks_still_comes_back(stage: Stage, network: Network) -> None:
    """The look that it was at does not take the place of the next one."""
    worker = in_round(stage, 4)
    stage.see(4, RoundState.BROKEN, ghosts=(Ghost(node="me", mod_revision=3),))
    worker.await_one(Over)
    worker.ready(5)
    stage.await_record(reported=5, unreachable=("other",))
    network.meanwhile = lambda: stage.see(5, members=(OTHER,), left_out="me")
    stage.await_record(state=NodeState.WARMING)
    network.cut.clear()
    stage.await_record(state=NodeState.READY)


def test_a_node_that_was_only_slow_accuses_nobody(stage: Stage, network: Network) -> None:
    """It reaches all who could not reach it."""
    network.cut.clear()
    worker = in_round(stage, 4)
    stage.see(4, RoundState.BROKEN, ghosts=(Ghost(node="me", mod_revision=3),))
    worker.await_one(Over)
    worker.ready(5)
    assert stage.await_record(reported=5).unreachable == ()
    assert network.asked


def in_round(stage: Stage, number: int, stalled: int = 0) -> Worker:
    """A worker in round ``number``."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(number)
    stage.await_record(reported=number)
    stage.see(number, stalled=stalled)
    worker.await_one(Formation)
    return worker


def test_a_node_that_is_left_out_keeps_away_until_it_reaches_the_others(stage: Stage, network: Network) -> None:
    """It does not offer itself meanwhile, and does by itself as soon as the network is whole."""
    failed_forming(stage, 4, stalled=1)
    stage.await_record(reported=5, state=NodeState.READY)
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    stage.await_record(state=NodeState.WARMING)
    said = len(stage.notebook.records)
    asked = len(network.asked)
    eventually(lambda: len(network.asked) > asked + 1, "nobody looked again, twice")
    assert all(each.state is NodeState.WARMING for each in stage.notebook.records[said:])
    network.cut.clear()
    assert stage.await_record(state=NodeState.READY).unreachable == ()


def test_a_node_does_not_come_back_because_the_store_is_away(stage: Stage, network: Network) -> None:
    """Whom it reaches is not known then; it would be taken in as soon as the store is back, and stop all again."""
    failed_forming(stage, 4, stalled=1)
    stage.await_record(reported=5, state=NodeState.READY)
    network.store = False
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    stage.await_record(state=NodeState.WARMING)
    looks = network.looks
    eventually(lambda: network.looks > looks + 1, "nobody looked again, twice")
    assert stage.notebook.record.state is NodeState.WARMING
    network.store = True
    network.cut.clear()
    stage.await_record(state=NodeState.READY)


def test_a_node_that_has_come_back_stays_so_while_the_round_without_it_stands(stage: Stage, network: Network) -> None:
    """That round may be looked at again at any time: a worker reports, or the store is read anew."""
    failed_forming(stage, 4, stalled=1)
    stage.await_record(reported=5, state=NodeState.READY)
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    stage.await_record(state=NodeState.WARMING)
    network.cut.clear()
    stage.await_record(state=NodeState.READY)
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    assert stage.notebook.record.state is NodeState.READY


def test_a_node_that_is_left_out_for_another_reason_offers_itself_at_once(stage: Stage) -> None:
    """It may have been slow to answer, say."""
    failed_forming(stage, 4, stalled=0)
    stage.await_record(reported=5, state=NodeState.READY)
    stage.see(5, members=(OTHER,), stalled=1)
    stage.await_record(reported=5, state=NodeState.READY)
    assert all(each.state is not NodeState.WARMING for each in stage.notebook.records[1:] if each.reported > 0)
