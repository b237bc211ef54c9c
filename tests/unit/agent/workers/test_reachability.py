"""Who cannot be reached, and how long a node keeps away because of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from queue import Queue

import pytest

from elastic_trainer.agent.workers import conductor_shell as contacts
from elastic_trainer.agent.workers.conductor import Reached
from elastic_trainer.agent.workers.conductor_shell import ask_in_thread, missing_of, reaches, records_of
from elastic_trainer.ipc.channel import Failed, Leaving
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundState
from elastic_trainer.membership.rules import UNFORMED_ROUNDS
from elastic_trainer.store.api import RunKeys
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.support.threadless import no_new_threads
from tests.support.waiting import LIMIT_S
from tests.unit.agent.stage import BASE, OTHER, Stage, Worker
from tests.unit.membership.scenes import node

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


def test_those_that_do_not_answer_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order asked for; a node without a key, or without a port, is not missing. What the own machine answers at
    a loopback address says nothing about a node, unless this one announces such an address too. A node that reaches
    nobody of a thousand says so soon, by those it could try."""
    records = {"a": record("10.0.0.1"), "b": record("10.0.0.2"), "c": record("10.0.0.3"), "d": record("10.0.0.4", 0)}
    assert missing_of("cbadx", records, try_one=lambda host, port: host == "10.0.0.2") == ("c", "a")
    assert missing_of((), records) == ()
    behind = {"a": record("127.0.0.1")}
    assert missing_of("a", behind, own="10.0.0.2", try_one=lambda host, port: True) == ("a",)
    assert missing_of("a", behind, try_one=lambda host, port: True) == ()
    monkeypatch.setattr(contacts, "LIMIT_S", 0.0)
    crowd = {f"n{number}": record("10.0.0.1") for number in range(1000)}
    assert missing_of(crowd, crowd, try_one=lambda host, port: False) == ()


def test_without_the_store_nobody_is_missing() -> None:
    backend = MemoryBackend()
    backend.outage(True)
    assert missing_of("a", records_of(MemoryStore(backend), KEYS)) is None


@pytest.mark.parametrize("threads", [True, False])
def test_a_look_that_fails_is_answered_too(threads: bool) -> None:
    """The messages of a worker wait for it, also where no thread can be started."""

    def records() -> dict[str, NodeRecord]:
        raise MemoryError

    found: Queue[Reached] = Queue()
    with nullcontext() if threads else no_new_threads():
        ask_in_thread(records, "127.0.0.1", ("a",), found.put)
    assert found.get(timeout=LIMIT_S).missing is None


class Network:
    """Which nodes can be reached from node ``me``: not the other one, at first."""

    def __init__(self) -> None:
        self.cut: set[str] = {"other"}
        self.asked: list[str] = []
        self.store = True

    def records(self) -> dict[str, NodeRecord]:
        return {"other": record("other"), "me": record("me")} if self.store else {}

    def reaches(self, host: str, port: int) -> bool:
        self.asked.append(host)
        return host not in self.cut

    def ask(self, nodes: tuple[str, ...], answered: Callable[[Reached], None]) -> None:
        answered(Reached(missing_of(nodes, self.records(), try_one=self.reaches), self.records()))


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def stage(network: Network) -> Stage:
    return Stage(network.ask)


def failed_forming(stage: Stage, number: int, stalled: int) -> Worker:
    """A worker that could not form round ``number``, and is free for the next."""
    worker = stage.working(number, stalled=stalled)
    worker.say(Failed(number=number, error="gloo: timed out", forming=True))
    stage.see(number, RoundState.BROKEN, stalled=stalled)
    worker.ready(number + 1)
    return worker


def accused(stage: Stage) -> Worker:
    """A worker that is free after round 4, which the others have broken since this node did not answer."""
    worker = stage.working(4)
    stage.see(4, RoundState.BROKEN, ghosts=(node("me", 3).ghost,))
    assert (stage.record().acknowledged, stage.record().reported, stage.record().unreachable) == (5, 4, ())
    worker.ready(5)
    return worker


@pytest.mark.parametrize(("stalled", "named"), [(0, ()), (1, ("other",))])
def test_the_second_form_that_fails_makes_a_node_name_whom_it_does_not_reach(
    stage: Stage, stalled: int, named: tuple[str, ...]
) -> None:
    """The names are in the record that says that its workers are free: the next round is decided by them. After the
    first one a peer may have died."""
    failed_forming(stage, 4, stalled)
    assert (stage.record().reported, stage.record().unreachable) == (5, named)


def test_a_node_that_others_did_not_reach_looks_whom_it_reaches_itself(stage: Stage, network: Network) -> None:
    """Before it says that it is free: two nodes that name each other are not put into one round again. It looks again
    while the round is over, since no other is formed while two that are needed name each other."""
    accused(stage)
    assert (stage.record().reported, stage.record().unreachable) == (5, ("other",))
    stage.run_for(3.0)
    assert stage.record().unreachable == ("other",)
    network.cut.clear()
    stage.run_for(1.0)
    assert (stage.record().reported, stage.record().unreachable) == (5, ())


@pytest.mark.parametrize("missing", ["the other node", "the store"])
def test_a_node_that_is_left_out_keeps_away_until_it_reaches_the_others(
    stage: Stage, network: Network, missing: str
) -> None:
    """It does not offer itself meanwhile, and does by itself as soon as the network is whole. Whom it reaches is not
    known without the store, so that is no reason to come back."""
    failed_forming(stage, 4, stalled=1)
    network.store = missing != "the store"
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    stage.run_for(60.0)
    assert stage.record().state is NodeState.WARMING
    network.store = True
    network.cut.clear()
    stage.run_for(60.0)
    assert (stage.record().state, stage.record().unreachable) == (NodeState.READY, ())
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    assert stage.record().state is NodeState.READY, "the round without it still stands"


def test_a_worker_that_reaches_nobody_names_whom_it_looked_for_though_its_agent_reaches_all(
    stage: Stage, network: Network
) -> None:
    """As with a worker that publishes its loopback address: the round ends with a sentence about both nodes, and a node
    that is left out for it keeps out longer, since each of its tries stops the others."""
    network.cut.clear()
    worker = stage.working(4, stalled=1)
    worker.say(Failed(number=4, error="gloo: refused", forming=True, tried="127.0.0.1"))
    failure = stage.only_break.failure
    assert failure.unformed
    assert failure.reason.startswith("node me cannot reach node other at 127.0.0.1, which its worker published, while")
    stage.see(4, RoundState.BROKEN, stalled=1)
    worker.ready(5)
    assert stage.record().unreachable == ("other",)
    stage.see(5, members=(OTHER,), left_out="me", stalled=2)
    stage.run_for(9.0)
    assert stage.record().state is NodeState.WARMING
    stage.run_for(2.0)
    assert stage.record().state is NodeState.READY


def test_a_failure_after_the_groups_had_formed_is_no_fault_of_the_network(stage: Stage, network: Network) -> None:
    """A worker was killed while the state was sent, say: no node is named, and the round counts as formed."""
    network.cut.clear()
    worker = stage.working(4, stalled=1)
    worker.say(Failed(number=4, error="connection closed by peer"))
    failure = stage.only_break.failure
    assert (failure.unformed, failure.reason) == (False, "node me lost contact with a peer (connection closed by peer)")
    stage.see(4, RoundState.BROKEN, stalled=1)
    worker.ready(5)
    assert (stage.record().unreachable, network.asked) == ((), [])


def test_the_sentence_is_about_the_round_that_failed(stage: Stage, network: Network) -> None:
    worker = failed_forming(stage, 4, stalled=1)
    assert stage.only_break.failure.reason.startswith("node me cannot reach node other at other, which other announces")
    network.cut.clear()
    stage.see(5, stalled=0)
    worker.say(Failed(number=5, error="gloo: timed out", forming=True))
    assert stage.notebook.breaks[-1].failure.reason == "node me lost contact with a peer (gloo: timed out)"


def test_a_round_that_a_planned_change_leads_to_is_searched_with_its_newcomers(stage: Stage, network: Network) -> None:
    worker = stage.working(4, members=(stage.member(),), stalled=1)
    network.cut = {"other"}
    stage.see(4, RoundState.DRAINING, members=(stage.member(),), stalled=1, next=stage.document(5, stalled=1))
    worker.ready(5, planned=True)
    worker.say(Failed(number=5, error="gloo: timed out", forming=True))
    assert stage.only_break.failure.reason.startswith("node me cannot reach node other at other")
    assert stage.record().unreachable == ("other",)


def test_messages_wait_behind_one_that_waits_for_an_answer_but_not_those_of_others() -> None:
    """In their order; a worker that leaves waits for nothing, since its connection closes next."""
    asked: list[Callable[[Reached], None]] = []
    stage = Stage(lambda nodes, answered: asked.append(answered))
    stage.begin(2)
    slow, leaving = Worker(stage, 0), Worker(stage, 1)
    for worker in (slow, leaving):
        worker.ready(4)
    stage.see(4, members=(stage.member(0, 2), OTHER), stalled=1)
    slow.say(Failed(number=4, error="gloo: timed out", forming=True))
    slow.ready(5)
    leaving.ready(5)
    assert (stage.notebook.breaks, stage.record().reported) == ([], 4)
    leaving.say(Failed(number=4, error="closed", forming=True))
    leaving.say(Leaving(status="stopped", step=0))
    assert stage.only_break.failure.reason == "node me lost contact with a peer (closed)"
    asked.pop()(Reached(("other",), {"other": record("other")}))
    assert (stage.record().reported, stage.record().unreachable) == (5, ("other",))
    assert asked == []


@pytest.mark.parametrize(("stalled", "named"), [(0, ()), (1, ("me",))])
def test_a_node_whose_workers_publish_their_loopback_names_itself(
    stage: Stage, network: Network, stalled: int, named: tuple[str, ...]
) -> None:
    """Once a second round was not formed, and whomever its own agent does not reach; its record says why."""
    worker = stage.working(4, stalled=stalled)
    worker.say(Failed(number=4, error="gloo: refused", forming=True, tried="10.0.0.2", loopback="lo"))
    stage.see(4, RoundState.BROKEN, stalled=stalled)
    worker.ready(5)
    assert stage.record().unreachable == named
    why = "workers of node me publish 127.0.0.1, which no other host reaches: GLOO_SOCKET_IFNAME=lo; unset it there, or"
    assert stage.record().cause.startswith(why if named else "")
    assert stage.only_break.failure.reason.startswith(why if named else "node me lost contact with a peer")
    assert bool(stage.record().cause) is bool(named)


def test_a_node_that_came_back_and_trained_keeps_out_for_the_usual_time(stage: Stage, network: Network) -> None:
    network.cut.clear()
    stage.working(4, members=(OTHER,), left_out="me", unformed=UNFORMED_ROUNDS)
    stage.run_for(11.0)
    assert stage.record().state is NodeState.READY
    worker = stage.working(5)
    worker.progress(5, 1)
    stage.see(6, members=(OTHER,), left_out="me")
    stage.run_for(2.0)
    assert stage.record().state is NodeState.READY
