"""The rendezvous handler under torchrun's real agent loop, several nodes in one process, on the memory store."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_trainer.agent import plugin
from elastic_trainer.agent.health.duties import Health
from elastic_trainer.agent.rendezvous.addresses import default_node_id
from elastic_trainer.agent.rendezvous.launcher import local_workers
from elastic_trainer.agent.rendezvous.restart import (
    Etcd3RendezvousHandler,
    exit_code_after,
    round_is_over,
    was_terminated,
)
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT, ConfigError
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.model import Cause, checked_name
from elastic_trainer.settings import (
    ENV_GROUP_TIMEOUT,
    ENV_NODE,
    ENV_PAGES,
    ENV_REACHED,
    ENV_ROUND,
    RendezvousOptions,
)
from elastic_trainer.store.keys import RunKeys
from tests.support.crew import LIMIT_S, Gate, GatedStore, eventually, soon
from tests.support.memory_store import MemoryBackend
from tests.support.torchrun import AgentOfFlags

KEYS = RunKeys("/elastic_trainer", "run")


class Nodes:
    """Nodes of one run, each with torchrun's loop and a handler of its own."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.handlers: dict[str, Etcd3RendezvousHandler] = {}
        self.stores: dict[str, GatedStore] = {}
        self.agents: dict[str, AgentOfFlags] = {}

    def handler(self, name: str, least: int = 2, most: int = 3, **options: Any) -> Etcd3RendezvousHandler:
        self.stores[name] = GatedStore(self.backend, Gate())
        quick: dict[str, Any] = {"last_call": LIMIT_S, "join_batch": 0.0, "join_interval": 0.0, "node_id": name}
        self.handlers[name] = Etcd3RendezvousHandler(
            self.stores[name],
            "run",
            RendezvousOptions(**(quick | options)),
            min_nodes=least,
            max_nodes=most,
            address="127.0.0.1",
        )
        return self.handlers[name]

    def start(self, name: str, size: int = 1, max_restarts: int = 100, **options: Any) -> AgentOfFlags:
        """A node begins; returns when its key is there, so that seniority is in the order of the calls."""
        agent = AgentOfFlags(self.handler(name, **options), size, max_restarts)
        self.agents[name] = agent
        agent.begin()
        eventually(lambda: agent.ended.is_set() or self.present(name), f"{name} does not show itself")
        return agent

    def present(self, name: str) -> bool:
        return GatedStore(self.backend, Gate()).get(KEYS.node(name), soon()).first is not None

    def document(self) -> RoundDocument:
        found = GatedStore(self.backend, Gate()).get(KEYS.round, soon()).first
        assert found is not None
        return RoundDocument.decode(found.value, found.key)

    def await_starts(self, count: int, *names: str) -> list[tuple[int, ...]]:
        """Wait until the workers of these nodes were started ``count`` times; their ranks now."""
        agents = [self.agents[name] for name in names]
        eventually(lambda: all(len(agent.starts) >= count for agent in agents), lambda: f"{[a.starts for a in agents]}")
        return [agent.starts[-1] for agent in agents]

    def end(self) -> None:
        for agent in self.agents.values():
            agent.finish()
        for agent in self.agents.values():
            agent.ended.wait(LIMIT_S)
        for handler in self.handlers.values():
            handler.shutdown()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """No node yet; all are ended after the test, and the environment is as it was."""
    for name in (ENV_NODE, ENV_ROUND, "ELASTIC_TRAINER_RECOVERY"):
        monkeypatch.setenv(name, "")
    for name in (ENV_GROUP_TIMEOUT, ENV_PAGES, ENV_REACHED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    running = Nodes()
    yield running
    running.end()


def three(nodes: Nodes) -> list[tuple[int, ...]]:
    for name in "abc":
        nodes.start(name)
    return nodes.await_starts(1, "a", "b", "c")


def test_torchrun_starts_workers_with_the_agreed_ranks(nodes: Nodes) -> None:
    """Three nodes, unequal: every worker of the world has one rank, and all see the same world."""
    nodes.start("a", size=2)
    nodes.start("b", size=1)
    nodes.start("c", size=3)
    assert nodes.await_starts(1, "a", "b", "c") == [(0, 1), (2,), (3, 4, 5)]
    assert [agent.worlds for agent in nodes.agents.values()] == [[6], [6], [6]]


def test_workers_that_fail_restart_everywhere_and_keep_their_ranks(nodes: Nodes) -> None:
    """The other nodes' torchruns are told by their next poll; only the failed node uses up a restart."""
    assert three(nodes) == [(0,), (1,), (2,)]
    nodes.agents["b"].fail()
    assert nodes.await_starts(2, "a", "b", "c") == [(0,), (1,), (2,)]
    assert [agent._remaining_restarts for agent in nodes.agents.values()] == [100, 99, 100]


def test_workers_learn_of_their_round_and_node_by_the_environment(nodes: Nodes) -> None:
    """torchrun's children inherit what the handler sets before they start."""
    nodes.start("a", least=1, most=1)
    nodes.await_starts(1, "a")
    assert (os.environ[ENV_NODE], os.environ[ENV_ROUND]) == ("a", "1")


def test_all_finish_and_the_run_is_closed(nodes: Nodes) -> None:
    """The first to finish stays until the last one has."""
    three(nodes)
    nodes.agents["a"].finish()
    nodes.agents["b"].finish()
    eventually(lambda: nodes.document().state is RoundState.ACTIVE, "the run ended too early")
    assert not nodes.agents["a"].ended.wait(0.3)
    nodes.agents["c"].finish()
    for agent in nodes.agents.values():
        assert agent.ended.wait(LIMIT_S)
        assert agent.result is not None
        assert agent.result.state is WorkerState.SUCCEEDED
    assert nodes.document().state is RoundState.CLOSED
    assert all(handler.is_closed() for handler in nodes.handlers.values())


def test_a_node_that_comes_after_a_success_leaves_with_status_0(nodes: Nodes) -> None:
    """It has nothing to do, which is no failure."""
    nodes.start("a", least=1, most=2, last_call=0.0)
    nodes.await_starts(1, "a")
    nodes.agents["a"].finish()
    assert nodes.agents["a"].ended.wait(LIMIT_S)
    late = nodes.start("late", least=1, most=2)
    assert late.ended.wait(LIMIT_S)
    assert isinstance(late.exit, SystemExit)
    assert late.exit.code == 0
    assert late.starts == []


def test_a_node_that_fails_for_good_leaves_and_the_others_go_on(nodes: Nodes) -> None:
    """No restarts are left: torchrun reports failure, the node's key goes with its shutdown, the others close ranks."""
    nodes.start("a")
    nodes.start("b", max_restarts=0)
    nodes.start("c")
    nodes.await_starts(1, "a", "b", "c")
    failed = nodes.agents["b"]
    failed.fail()
    assert failed.ended.wait(LIMIT_S)
    assert failed.result is not None
    assert failed.result.state is WorkerState.FAILED
    assert nodes.present("b")
    nodes.handlers["b"].shutdown()  # as torchrun's launcher does
    assert not nodes.present("b")
    assert nodes.await_starts(2, "a", "c") == [(0,), (1,)]


def test_a_spare_waits_and_replaces_a_node_that_left(nodes: Nodes) -> None:
    """Above max a node starts no workers until it is needed."""
    three(nodes)
    spare = nodes.start("d")
    nodes.agents["b"].fail()
    nodes.await_starts(2, "a", "b", "c")
    assert spare.starts == []
    nodes.agents["c"].fail()
    nodes.agents["c"]._remaining_restarts = 0
    assert nodes.agents["c"].ended.wait(LIMIT_S)
    nodes.handlers["c"].shutdown()
    assert nodes.await_starts(1, "d") == [(2,)]
    assert nodes.await_starts(3, "a", "b") == [(0,), (1,)]


def test_a_disagreement_ends_torchrun_with_status_78(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence on stderr, no traceback."""
    nodes.start("a", least=1, most=2, last_call=0.0)
    other = nodes.start("b", least=1, most=3)
    assert other.ended.wait(LIMIT_S)
    assert isinstance(other.exit, SystemExit)
    assert other.exit.code == EXIT_CONFIG
    assert (
        "elastic-trainer: this node disagrees with the run: max nodes 3 here, 2 in the run" in capsys.readouterr().err
    )


def test_polling_for_changes_does_no_io(nodes: Nodes) -> None:
    """torchrun asks ten times a second: the answer comes from what the watch has told, also when the store is away."""
    nodes.start("a", least=1, most=1)
    nodes.await_starts(1, "a")
    handler, store = nodes.handlers["a"], nodes.stores["a"]
    nodes.backend.outage(True)
    before = [call for call in store.calls if call != "keep_alive"]
    assert [handler.num_nodes_waiting() for _ in range(1000)] == [0] * 1000
    assert [call for call in store.calls if call != "keep_alive"] == before
    nodes.backend.outage(False)


def test_shutdown_takes_the_key_away_and_may_be_repeated(nodes: Nodes) -> None:
    """torchrun calls it, and the interpreter's exit calls it again."""
    nodes.start("a", least=1, most=1)
    nodes.await_starts(1, "a")
    nodes.agents["a"].finish()
    assert nodes.agents["a"].ended.wait(LIMIT_S)
    assert nodes.present("a")
    assert [nodes.handlers["a"].shutdown() for _ in range(3)] == [True] * 3
    assert not nodes.present("a")
    assert nodes.handlers["a"].num_nodes_waiting() == 0


def test_outside_of_torchrun_the_handler_says_what_it_needs(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that uses the backend by itself is told how many workers nobody told it."""
    with pytest.raises(ConfigError, match="torchrun"):
        local_workers()
    handler = nodes.handler("a", least=1, most=1)
    with pytest.raises(SystemExit) as raised:
        handler.next_rendezvous()
    assert raised.value.code == EXIT_CONFIG
    assert "start the job with torchrun" in capsys.readouterr().err


def test_the_launcher_is_found_up_the_stack(nodes: Nodes) -> None:
    """How many workers, their role, and how often they may restart."""
    agent = AgentOfFlags(nodes.handler("a"), size=4, max_restarts=7, role="trainer")
    found = agent.called(local_workers)
    assert (found.count, found.role, found.max_restarts) == (4, "trainer", 7)


@pytest.mark.parametrize(
    ("run_id", "endpoint", "limits", "config", "sentence"),
    [
        ("a/b", "h:1", (1, 1), {}, "run id (--rdzv-id) 'a/b' is not valid"),
        ("", "h:1", (1, 1), {}, "run id (--rdzv-id) '' is not valid"),
        ("run", "", (1, 1), {}, "no store address was given (add --rdzv-endpoint host:2379)"),
        ("run", "h:port", (1, 1), {}, "store endpoint 'h:port' is not host:port"),
        ("run", "h:1", (1, 1), {"tttl": "3"}, "--rdzv-conf: unknown key 'tttl'"),
        ("run", "h:1", (1, 1), {"ttl": "soon"}, "--rdzv-conf: 'ttl' is 'soon'"),
        ("run", "h:1", (1, 1), {"ttl": "1"}, "--rdzv-conf: 'ttl' is '1'"),
        ("run", "h:1", (1, 1), {"recovery": "magic"}, "--rdzv-conf: 'recovery' is 'magic'"),
        ("run", "h:1", (1, 1), {"ca_cert": "/no/such/file"}, "'ca_cert' is '/no/such/file': the file cannot be read"),
    ],
)
def test_wrong_parameters_end_in_one_sentence(
    run_id: str,
    endpoint: str,
    limits: tuple[int, int],
    config: dict[str, Any],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is sent to anybody; status 78."""
    parameters = RendezvousParameters("etcd3", endpoint, run_id, *limits, **config)
    with pytest.raises(SystemExit) as raised:
        plugin.handler()(parameters)
    assert raised.value.code == EXIT_CONFIG
    said = capsys.readouterr().err
    assert said.startswith("elastic-trainer: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_torchrun_s_own_options_are_no_error() -> None:
    """torchrun adds a timeout to every backend's configuration: what fails here is only the store."""
    parameters = RendezvousParameters(
        "etcd3", "127.0.0.1:1", "run", 1, 1, timeout=900, read_timeout=60, connect_timeout="0.1"
    )
    with pytest.raises(SystemExit) as raised:
        plugin.handler()(parameters)
    assert raised.value.code != EXIT_CONFIG


def child_failure(*codes: int) -> ChildFailedError:
    """What torchrun ends with when its workers ended with these codes."""
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "/nowhere") for rank, code in enumerate(codes)}
    return ChildFailedError("job", failures)


def test_exit_codes_say_what_torchruns_own_would_not() -> None:
    """143 for an eviction, 78 when a worker's configuration is wrong. All other failures keep torchrun's own code."""
    evicted, wrong = SignalException("told to end", signal.SIGTERM), child_failure(-15, EXIT_CONFIG)
    assert [exit_code_after(evicted, made_steps=made) for made in (False, True)] == [EXIT_LEFT, EXIT_LEFT]
    assert exit_code_after(wrong, made_steps=False) == EXIT_CONFIG
    assert exit_code_after(wrong, made_steps=True) is None, "it was right before: other nodes may go on"
    for other in (child_failure(1, -9), RuntimeError("crashed"), SystemExit(3), None):
        assert exit_code_after(other, made_steps=False) is None


def test_only_a_sigterm_is_an_eviction() -> None:
    """torchrun raises one kind of error for all signals; Ctrl-C and crashes keep their own exit codes."""
    assert was_terminated(SignalException("told to end", signal.SIGTERM))
    assert not was_terminated(SignalException("interrupted", signal.SIGINT))
    assert not was_terminated(RuntimeError("crashed"))
    assert not was_terminated(None)


@pytest.mark.parametrize(
    "host", ["node-7.example.org", "", "_gpu_1", "-x", ".hidden", "rechnér", "узел", "n" * 300, "a b"]
)
def test_the_default_node_id_is_valid_whatever_the_host_is_called(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no two processes get the same one."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    first, second = default_node_id(), default_node_id()
    assert checked_name(first, "node id") == first
    assert first != second


def test_a_round_is_over_when_a_later_one_or_its_own_end_is_seen() -> None:
    """An absent document proves nothing, and neither does an older one; a closed run lets its workers finish."""
    mine = RoundDocument(number=5, nonce="n", state=RoundState.ACTIVE, members=())

    def seen(number: int, state: RoundState) -> bool:
        return round_is_over(mine, mine.model_copy(update={"number": number, "state": state}))

    assert not round_is_over(mine, None)
    assert [seen(5, state) for state in RoundState] == [
        state in (RoundState.BROKEN, RoundState.DRAINING) for state in RoundState
    ]
    assert not any(seen(4, state) for state in RoundState)
    assert all(seen(6, state) for state in RoundState)


def test_a_worker_that_was_ended_is_told_as_hung_and_only_then(nodes: Nodes) -> None:
    """Also where another node had ended the round first: that reason is not kept for the next failure."""
    three(nodes)
    verdicts = nodes.handlers["b"]._node.health.verdicts  # type: ignore[union-attr]
    verdicts.end(2**30, "it stood still", local_rank=0)
    nodes.agents["b"].fail()
    nodes.await_starts(2, "a", "b", "c")
    assert nodes.document().cause is Cause.WORKER_HUNG
    verdicts.end(2**30, "it stood still again", local_rank=0)
    nodes.agents["a"].fail()
    nodes.await_starts(3, "a", "b", "c")
    assert nodes.document().cause is Cause.WORKER_LOST
    nodes.agents["b"].fail()
    nodes.await_starts(4, "a", "b", "c")
    assert nodes.document().cause is Cause.WORKER_LOST


def test_metrics_that_cannot_be_closed_keep_no_key(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose last words about its health fail leaves all the same."""
    nodes.start("a", least=1, most=1)
    nodes.await_starts(1, "a")

    close = Health.close

    def fail(health: Health) -> None:
        close(health)
        raise RuntimeError("full")

    monkeypatch.setattr(Health, "close", fail)
    nodes.handlers["a"].shutdown()
    assert not nodes.present("a")


def test_a_port_that_is_taken_is_one_sentence_and_leaves_nothing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user named it. The process ends, and what was begun is ended with it: the lease, and the threads."""
    endings: list[Callable[[], None]] = []
    monkeypatch.setattr("elastic_trainer.agent.rendezvous.restart.atexit.register", endings.append)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        handler = nodes.handler("a", least=1, most=1, metrics_port=port)
        with pytest.raises(SystemExit) as ended:
            handler.next_rendezvous()
    assert ended.value.code == EXIT_CONFIG
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert len(endings) == 1
    endings[0]()
    assert nodes.backend._leases == {}


def test_an_endpoint_that_nobody_asked_for_is_done_without(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a node listens on loopback: where that is not possible, it trains all the same."""

    def refuse(*_: Any) -> None:
        raise ConfigError("cannot listen")

    monkeypatch.setattr("elastic_trainer.agent.health.service.NodeEndpoint", refuse)
    nodes.start("a", least=1, most=1)
    assert nodes.await_starts(1, "a") == [(0,)]
