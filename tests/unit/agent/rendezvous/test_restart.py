"""The rendezvous handler: what it reports torchrun, what it refuses, and how a node leaves its round and its run."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.agent.health import service
from elastic_trainer.agent.rendezvous.restart import ArrivedNode, Etcd3RendezvousHandler, round_is_over
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.ipc.address import default_node_id
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.model import Cause, checked_name
from elastic_trainer.settings import RendezvousOptions
from tests.support.memory_store import MemoryStore
from tests.support.waiting import soon

MINE = RoundDocument(number=5, nonce="n", state=RoundState.ACTIVE, members=())


class Node(SimpleNamespace):
    """A node that has arrived, in so far as its handler asks it; a failed worker of it was, or was not, found hung."""

    def __init__(self, seen: RoundDocument, hung: str | None = None) -> None:
        self.seen, self.hung = seen, [hung]
        self.broken: list[RoundFailure] = []
        self.left = 0
        super().__init__(
            member=self, health=SimpleNamespace(hung=SimpleNamespace(take_any=self.hung.pop), made_steps=False)
        )

    def observation(self) -> SimpleNamespace:
        return SimpleNamespace(round=self.seen)

    def break_round(self, failure: RoundFailure, deadline: Deadline) -> None:
        self.broken.append(failure)

    def leave(self, departure: object = None) -> None:
        self.left += 1
        self.health.made_steps = False  # its pages are closed


def handler_of(node: Node | None) -> Etcd3RendezvousHandler:
    options = RendezvousOptions(node_id="a")
    handler = Etcd3RendezvousHandler(MemoryStore(), "run", options, min_nodes=1, max_nodes=2, address="127.0.0.1")
    handler._node, handler._current = cast("ArrivedNode | None", node), MINE
    return handler


def test_polling_for_changes_does_no_io() -> None:
    """torchrun asks ten times a second: the answer comes from what the watch has delivered."""
    node = Node(MINE)
    handler = handler_of(node)
    assert handler.num_nodes_waiting() == 0
    node.seen = MINE.model_copy(update={"state": RoundState.BROKEN})
    assert handler.num_nodes_waiting() == 1
    assert handler_of(None).num_nodes_waiting() == 0


def test_shutdown_may_be_repeated() -> None:
    node = Node(MINE)
    node.health.made_steps = True
    handler = handler_of(node)
    assert [handler.shutdown() for _ in range(3)] == [True] * 3
    assert node.left == 1
    assert handler._made_steps


@pytest.mark.parametrize(
    ("hung", "over", "cause"),
    [
        (None, False, Cause.WORKER_LOST),
        ("it stood still", False, Cause.WORKER_HUNG),
        ("it stood still", True, None),
    ],
)
def test_a_round_is_left_with_what_ended_the_workers(hung: str | None, over: bool, cause: Cause | None) -> None:
    """Where another node had ended the round first nobody is blamed, and the reason is not kept for the next time."""
    node = Node(MINE.model_copy(update={"state": RoundState.BROKEN}) if over else MINE, hung)
    handler = handler_of(node)
    planned, _ = handler._leave_round(cast("ArrivedNode", node), soon())
    assert planned is over
    assert [each.cause for each in node.broken] == ([] if over else [cause])
    assert node.hung == []


def test_metrics_that_cannot_be_closed_keep_no_key() -> None:
    closed: list[str] = []

    def fail() -> None:
        raise OSError("no space left")

    def part(name: str) -> Any:
        return SimpleNamespace(
            close=lambda *_: closed.append(name),
            leave=lambda *_: closed.append(name),
            observation=lambda: SimpleNamespace(round=None),
            stop=lambda: closed.append(f"{name} stops"),
        )

    node = ArrivedNode(*map(part, ("member", "port", "supervisor", "health", "rescue", "copies")))
    cast("SimpleNamespace", node.health).close = fail
    node.leave()
    assert closed == ["member", "copies stops", "rescue", "copies", "supervisor", "port"]


def test_an_endpoint_that_nobody_asked_for_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a node listens on loopback: where that is not possible, it trains all the same."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("cannot listen")

    monkeypatch.setattr(service, "NodeEndpoint", refuse)
    nothing: Any = None
    assert service._endpoint(RendezvousOptions(), nothing, nothing) is None
    with pytest.raises(ConfigError):
        service._endpoint(RendezvousOptions(metrics_port=9400), nothing, nothing)


@pytest.mark.parametrize(
    "host", ["node-7.example.org", "", "_gpu_1", "-x", ".hidden", "rechnér", "узел", "n" * 300, "a b"]
)
def test_the_default_node_id_is_valid_whatever_the_host_is_called(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    first, second = default_node_id(), default_node_id()
    assert checked_name(first, "node id") == first
    assert first != second


def test_a_round_is_over_when_a_later_one_or_its_own_end_is_seen() -> None:
    """An absent document proves nothing, and neither does an older one; a closed run lets its workers finish."""

    def seen(number: int, state: RoundState) -> bool:
        return round_is_over(MINE, MINE.model_copy(update={"number": number, "state": state}))

    assert not round_is_over(MINE, None)
    assert [seen(5, state) for state in RoundState] == [
        state in (RoundState.BROKEN, RoundState.DRAINING) for state in RoundState
    ]
    assert not any(seen(4, state) for state in RoundState)
    assert all(seen(6, state) for state in RoundState)
