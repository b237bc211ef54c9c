"""The in-place handler under torchrun's real agent loop: workers start at once, alone, and are led by the conductor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import structlog

from elastic_trainer.agent.rendezvous import in_place
from elastic_trainer.agent.rendezvous.in_place import InPlaceHandler
from elastic_trainer.agent.workers import session_watch
from elastic_trainer.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError, ElasticTrainerError
from elastic_trainer.ipc.messages import Exit, Formation, Leaving, Over
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import (
    ENV_CHANNEL,
    ENV_GROUP_TIMEOUT,
    ENV_NODE,
    ENV_PAGES,
    ENV_REACHED,
    ENV_RECOVERY,
    ENV_ROUND,
    RendezvousOptions,
)
from elastic_trainer.store.keys import RunKeys
from tests.support.crew import LIMIT_S, Gate, GatedStore, eventually, soon
from tests.support.memory_store import MemoryBackend
from tests.support.torchrun import AgentOfFlags
from tests.unit.agent.channel import Worker

KEYS = RunKeys("/elastic_trainer", "run")
EXPORTED = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


class Handler(InPlaceHandler):
    """Keeps a fatal verdict instead of ending the test's process."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.verdict: ElasticTrainerError | None = None
        self.condemned = threading.Event()

    def _fatal(self, error: ElasticTrainerError) -> None:
        self.verdict = error
        self.condemned.set()


class Nodes:
    """In-place nodes of one run: torchrun's loop with flags for processes, and sockets for what workers say."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.handlers: dict[str, Handler] = {}
        self.agents: dict[str, AgentOfFlags] = {}

    def start(self, name: str, *, max_restarts: int = 100, **options: Any) -> AgentOfFlags:
        quick: dict[str, Any] = {"last_call": LIMIT_S, "join_batch": 0.0, "join_interval": 0.0, "node_id": name}
        quick |= {"recovery": RecoveryMode.IN_PLACE} | options
        self.handlers[name] = Handler(
            GatedStore(self.backend, Gate()),
            "run",
            RendezvousOptions(**quick),
            min_nodes=2,
            max_nodes=2,
            address="127.0.0.1",
        )
        self.agents[name] = AgentOfFlags(self.handlers[name], 1, max_restarts)
        self.agents[name].begin()
        return self.agents[name]

    def worker(self, name: str, starts: int = 1) -> Worker:
        """A worker of this node's present life, once torchrun has started it for the ``starts``-th time."""
        eventually(lambda: len(self.agents[name].starts) >= starts, f"the workers of {name} are not started")
        led = self.handlers[name]._led
        assert led is not None
        return Worker(led.conductor)

    def record(self, name: str) -> NodeRecord | None:
        found = GatedStore(self.backend, Gate()).get(KEYS.node(name), soon()).first
        return NodeRecord.decode(found.value, found.key) if found is not None else None

    def await_state(self, name: str, state: NodeState) -> None:
        eventually(lambda: (found := self.record(name)) is not None and found.state is state, f"{name}: {state}")

    def document(self) -> RoundDocument:
        found = GatedStore(self.backend, Gate()).get(KEYS.round, soon()).first
        assert found is not None
        return RoundDocument.decode(found.value, found.key)

    def train(self) -> dict[str, Worker]:
        """Two nodes, a and b, in round 1."""
        workers = {}
        for name in "ab":
            self.start(name)
            workers[name] = self.worker(name)
            workers[name].ready(1)
            self.await_state(name, NodeState.READY)
        for worker in workers.values():
            worker.await_one(Formation)
        return workers

    def end(self) -> None:
        for handler in self.handlers.values():
            handler.shutdown()
        for agent in self.agents.values():
            agent.finish()
            agent.ended.wait(LIMIT_S)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name in (ENV_NODE, ENV_ROUND, ENV_RECOVERY, ENV_CHANNEL, *EXPORTED):
        monkeypatch.setenv(name, "")
    for name in (ENV_GROUP_TIMEOUT, ENV_PAGES, ENV_REACHED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    running = Nodes()
    yield running
    running.end()


def test_workers_start_at_once_in_a_world_of_their_own(nodes: Nodes) -> None:
    """Nobody else is there yet: the worker runs all the same, as rank 0 of 1, and is told where its agent listens."""
    agent = nodes.start("a")
    eventually(lambda: agent.starts == [(0,)], "no worker")
    assert agent.worlds == [1]
    handler = nodes.handlers["a"]
    assert (os.environ[ENV_NODE], os.environ[ENV_ROUND], os.environ[ENV_RECOVERY]) == ("a", "0", "in_place")
    assert handler._led is not None
    assert os.environ[ENV_CHANNEL] == str(handler._led.conductor.path)
    assert float(os.environ[ENV_GROUP_TIMEOUT]) == handler._options.group_timeout_s > handler._options.phase_timeout
    assert [os.environ[name] for name in EXPORTED] == ["0", "0"]
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0
    nodes.await_state("a", NodeState.WARMING)


def test_no_restarts_is_a_mistake(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun's default would lose the node at its first crash: one sentence, and nothing is started."""
    agent = nodes.start("a", max_restarts=0)
    assert agent.ended.wait(LIMIT_S)
    assert isinstance(agent.exit, SystemExit)
    assert agent.exit.code == EXIT_CONFIG
    assert agent.starts == []
    said = capsys.readouterr().err
    assert said.count("elastic-trainer: ") == 1
    assert "torchrun's --max-restarts is 0 (add --max-restarts 100, say)" in said


def test_a_crash_restarts_the_workers_of_one_node_alone(nodes: Nodes) -> None:
    """The other node's are led into the next round; only the crashed node uses up a restart."""
    workers = nodes.train()
    assert nodes.document().number == 1
    workers["b"].connection.close()
    nodes.agents["b"].fail()
    assert workers["a"].await_one(Over).number == 1
    workers["a"].ready(2, step=3)
    fresh = nodes.worker("b", starts=2)
    fresh.ready(1)
    assert (fresh.await_one(Formation).number, workers["a"].await_one(Formation, 2).number) == (2, 2)
    assert nodes.document().failures == 1
    assert [agent._remaining_restarts for agent in nodes.agents.values()] == [100, 99]
    assert nodes.agents["a"].starts == [(0,)]


def test_a_finished_run_is_closed_and_all_end_with_success(nodes: Nodes) -> None:
    """Each stays until all are done; a spare is sent home."""
    workers = nodes.train()
    nodes.start("spare")
    spare = nodes.worker("spare")
    spare.ready(1)
    for name, worker in workers.items():
        worker.say(Leaving(status="done", step=9))
        nodes.await_state(name, NodeState.FINISHING)
        worker.connection.close()
    nodes.agents["a"].finish()
    nodes.await_state("a", NodeState.DONE)
    assert not nodes.agents["a"].ended.is_set()
    nodes.agents["b"].finish()
    assert spare.await_one(Exit).code == 0
    for name in "ab":
        assert nodes.agents[name].ended.wait(LIMIT_S)
        assert nodes.agents[name].exit is None
    assert nodes.document().result is RunResult.SUCCEEDED


def test_a_node_that_is_done_shares_the_fate_of_a_failed_run(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 fails after the other is done: nobody exits with success."""
    workers = nodes.train()
    for worker in workers.values():
        worker.say(Leaving(status="done", step=9))
    nodes.agents["b"].finish()
    nodes.await_state("b", NodeState.DONE)
    nodes.agents["a"].fail()
    assert nodes.agents["b"].ended.wait(LIMIT_S)
    assert isinstance(nodes.agents["b"].exit, SystemExit)
    assert nodes.agents["b"].exit.code == 1
    closed = nodes.document()
    assert (closed.state, closed.result) == (RoundState.CLOSED, RunResult.FAILED)
    assert "the run has failed: a did not finish" in capsys.readouterr().err


def test_a_script_without_a_session_is_a_mistake(nodes: Nodes) -> None:
    """It ends without one."""
    agent = nodes.start("a", session_timeout=LIMIT_S)
    eventually(partial(_has_started, agent), "no worker")
    agent.finish()
    handler = nodes.handlers["a"]
    assert handler.condemned.wait(LIMIT_S)
    assert handler.verdict is not None
    assert handler.verdict.exit_code == EXIT_CONFIG
    assert "needs a training script that opens an elastic_trainer.Session: the script ended" in str(handler.verdict)


def test_a_session_that_is_not_opened_in_time_ends_the_node(nodes: Nodes) -> None:
    """It may be a download that hangs, so another try is no mistake."""
    nodes.start("a", session_timeout=0.2)
    handler = nodes.handlers["a"]
    assert handler.condemned.wait(LIMIT_S)
    assert handler.verdict is not None
    assert handler.verdict.exit_code == EXIT_FAILURE
    assert str(handler.verdict).startswith("no worker has opened an elastic_trainer.Session within 0.2 s")
    assert "raise --rdzv-conf session_timeout" in str(handler.verdict)


def test_a_script_that_prepares_for_long_is_told_of_and_left_alone(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default for an hour: it may download its data, or compile. The log says so sooner, with what it does."""
    monkeypatch.setattr(session_watch, "FIRST_NOTE_S", 0.05)
    with structlog.testing.capture_logs() as said:
        nodes.start("a")
        told = partial(filter, lambda line: line["event"] == "session.awaited", said)
        eventually(lambda: len(list(told())) >= 3, "nothing is said")
        nodes.worker("a").ready(1)
        nodes.await_state("a", NodeState.READY)
    handler = nodes.handlers["a"]
    assert handler._options.session_timeout == 3600.0
    assert not handler.condemned.is_set()
    assert all(line["limit_s"] == 3600.0 for line in told())
    assert session_watch.doing([os.getpid()]).startswith(f"worker {os.getpid()} is ")
    assert "s of CPU time" in session_watch.doing([os.getpid()])


def test_of_two_fatal_verdicts_one_is_told(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another thread may come to its own while workers are ended and the node leaves: it says nothing, and the main
    thread, which sees the workers die, starts none again."""
    ended: list[int] = []
    monkeypatch.setattr(in_place, "kill_workers", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    eventually(partial(_has_started, nodes.start("a")), "no worker")
    verdict = partial(InPlaceHandler._fatal, nodes.handlers["a"])
    verdict(ConfigError("the first"))
    late = [
        threading.Thread(target=verdict, args=(ConfigError("the second"),), daemon=True),
        threading.Thread(target=nodes.handlers["a"].next_rendezvous, daemon=True),
    ]
    for thread in late:
        thread.start()
        thread.join(0.3)
    assert [thread.is_alive() for thread in late] == [True, True]
    assert ended == [EXIT_CONFIG]
    assert capsys.readouterr().err.splitlines()[-1] == "elastic-trainer: the first"


def _has_started(agent: AgentOfFlags) -> bool:
    return bool(agent.starts)


def test_waiting_for_others_ends(nodes: Nodes) -> None:
    """Too few nodes come within ``join_timeout``: the node says so and goes."""
    nodes.start("a", join_timeout=0.5)
    nodes.worker("a").ready(1)
    handler = nodes.handlers["a"]
    assert handler.condemned.wait(LIMIT_S)
    assert str(handler.verdict).startswith("fewer than 2 nodes were ready within 0.5 s (present: a)")
