"""The in-place handler: what it refuses, what it starts workers with, and how it ends."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_trainer.agent.rendezvous import in_place
from elastic_trainer.agent.rendezvous.in_place import InPlaceHandler, InPlaceNode
from elastic_trainer.agent.rendezvous.node import ArrivedNode
from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import RendezvousOptions, worker_environment
from elastic_trainer.variables import (
    ENV_CHANNEL,
    ENV_FORM_TIMEOUT,
    ENV_MEMORY,
    ENV_NODE,
    ENV_RECOVERY,
    ENV_ROUND,
    ENV_SHARD_NODES,
    ENV_SHARD_PLACE,
)
from tests.support.memory_store import MemoryStore


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> InPlaceHandler:
    shard = (ENV_SHARD_NODES, ENV_SHARD_PLACE)
    for name in (ENV_NODE, ENV_ROUND, ENV_RECOVERY, ENV_CHANNEL, ENV_FORM_TIMEOUT, ENV_MEMORY, *shard):
        monkeypatch.setenv(name, "")
    options = RendezvousOptions(node_id="a", recovery=RecoveryMode.IN_PLACE)
    return InPlaceHandler(MemoryStore(), "run", options, min_nodes=2, max_nodes=2, address="127.0.0.1")


def spec(workers: int, max_restarts: int) -> WorkerSpec:
    """What torchrun starts here."""
    nobody: Any = None
    return WorkerSpec("default", workers, nobody, entrypoint="none", max_restarts=max_restarts)


def test_workers_start_in_a_world_of_their_own(handler: InPlaceHandler) -> None:
    """Nobody else is there yet: the worker runs all the same, as rank 0 of 1, and knows where its agent listens.
    Healthy workers are never restarted."""
    nothing: Any = None
    memory: Any = SimpleNamespace(paths="/proc/1/fd/3:/proc/1/fd/4")
    copies: Any = SimpleNamespace(here="4712 ab")
    arrived = ArrivedNode(nothing, nothing, nothing, nothing, memory, copies)
    parts: dict[str, Any] = {
        "conductor": SimpleNamespace(life=3),
        "channel": SimpleNamespace(path="/tmp/agent.sock"),
        "guard": SimpleNamespace(port=4711),
        "arrived": arrived,
    }
    found = handler._provisional(spec(2, 100), cast("InPlaceNode", SimpleNamespace(**parts)), 1)
    assert (found.rank, found.world_size) == (0, 1)
    assert found.bootstrap_store_info is not None
    assert (found.bootstrap_store_info.master_addr, found.bootstrap_store_info.master_port) == ("127.0.0.1", 4711)
    assert [os.environ[name] for name in (ENV_NODE, ENV_ROUND, ENV_RECOVERY)] == ["a", "0", "in_place"]
    assert os.environ[ENV_CHANNEL] == "/tmp/agent.sock"
    assert worker_environment().memory == (Path("/proc/1/fd/3"), Path("/proc/1/fd/4"))
    assert worker_environment().copies_here == "127.0.0.1 4712 ab"
    assert (worker_environment().shard_nodes, worker_environment().shard_place) == (1, 1)
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0


def test_no_restarts_is_a_mistake(handler: InPlaceHandler) -> None:
    """torchrun's default would lose the node at its first crash: one sentence, before anybody sees the node."""
    with pytest.raises(ConfigError) as raised:
        handler._arrive_in_place(spec(1, 0))
    assert "torchrun's --max-restarts is 0 (add --max-restarts, for example 100)" in str(raised.value)
    assert handler._node is None


class _EndedElsewhereError(Exception):
    """Another thread ends the process."""


def test_of_two_fatal_verdicts_one_is_reported(
    handler: InPlaceHandler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another thread may come to its own while workers are ended and the node leaves: it says nothing, and the main
    thread, which sees the workers die, starts none again."""

    def elsewhere() -> None:
        raise _EndedElsewhereError

    ended: list[int] = []
    monkeypatch.setattr(in_place, "kill_workers", lambda *_: None)
    monkeypatch.setattr(in_place, "_await_the_end", elsewhere)
    monkeypatch.setattr(os, "_exit", ended.append)
    handler._fatal(ConfigError("the first"))
    with pytest.raises(_EndedElsewhereError):
        handler._fatal(ConfigError("the second"))
    for then in (handler.next_rendezvous, handler.shutdown):  # the latter where no restart is left
        with pytest.raises(_EndedElsewhereError):
            then()
    assert ended == [EXIT_CONFIG]
    assert capsys.readouterr().err.splitlines()[-1] == "elastic-trainer: the first"
