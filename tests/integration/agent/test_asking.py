"""One agent asks another: the port that answers, and what silence, refusal and strange answers mean."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from queue import SimpleQueue

import pytest

from elastic_trainer.agent.suspicion import (
    MOST_AT_ONCE,
    AgentLine,
    AgentPort,
    Asker,
    PeerReply,
)
from elastic_trainer.checkpoint.neighbours import COPIES
from elastic_trainer.clock import Deadline, pause
from tests.support.waiting import LIMIT_S

LOCAL = "127.0.0.1"
QUESTION = AgentLine(run="run", node="me").encode()


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker("run", "me")
    yield asker
    asker.close()


@contextmanager
def agent(run: str = "run", node: str = "other") -> Iterator[AgentPort]:
    with closing(AgentPort(LOCAL, run, node, socket.socket.close)) as port:
        yield port


def connected(port: AgentPort) -> socket.socket:
    return socket.create_connection((LOCAL, port.port), LIMIT_S)


def ask(asker: Asker, port: int) -> None:
    asker.ask("other", (socket.AF_INET, (LOCAL, port)))


def heard(asker: Asker, port: int) -> PeerReply:
    """What comes of the question to the agent at ``port``."""
    ask(asker, port)
    deadline = Deadline.after(LIMIT_S)
    while not (found := asker.receive(deadline.remaining_s())):
        assert not deadline.expired
    return found[0]


def test_an_agent_answers_that_it_lives(asker: Asker) -> None:
    """And knows that it was asked. One of another run, or of an older version, hangs up: it lives too."""
    with agent() as port, agent("another") as foreign:
        for each in (port, foreign):
            assert not heard(asker, each.port).dead
        assert asker.open == {}
        assert port.asked_at > 0 > foreign.asked_at


def test_who_wants_copies_is_handed_over_and_the_port_answers_the_next(asker: Asker) -> None:
    """However its first line arrives."""
    lent: SimpleQueue[socket.socket] = SimpleQueue()
    with closing(AgentPort(LOCAL, "run", "other", lent.put)) as port:
        for pieces in ([COPIES], [COPIES[:3], COPIES[3:]]):
            with connected(port) as client:
                for piece in pieces:
                    client.sendall(piece)
                    pause(0.1)
                with lent.get(timeout=LIMIT_S) as taken:
                    taken.sendall(b"nonce")
                    assert client.recv(100) == b"nonce"
        assert not heard(asker, port.port).dead


def test_a_refused_connection_is_a_dead_agent_and_so_is_another_node_at_its_address(asker: Asker) -> None:
    with socket.socket() as unused:
        unused.bind((LOCAL, 0))
        assert heard(asker, unused.getsockname()[1]).dead
    with agent(node="somebody") as port:
        assert heard(asker, port.port).dead


def test_silence_stays_an_open_question(asker: Asker) -> None:
    """The kernel of a frozen agent accepts, and nothing follows. It is asked once, until it is forgotten."""
    with socket.create_server((LOCAL, 0)) as frozen:
        ask(asker, frozen.getsockname()[1])
        since = asker.open["other"]
        for _ in range(3):
            assert asker.receive(0.1) == []
        ask(asker, frozen.getsockname()[1])
        assert asker.open == {"other": since}
        asker.forget("other")
        assert asker.open == {}


@pytest.mark.parametrize(
    "garbage",
    [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b'{"version": 2, "run": "run", "node": "x"}\n', b"\xff\n"],
)
def test_garbage_gets_no_answer_and_keeps_nobody_out(garbage: bytes) -> None:
    """A question may come in pieces, between those of others."""
    with agent() as port, connected(port) as visitor, connected(port) as slow, connected(port) as other:
        slow.sendall(QUESTION[:9])
        visitor.sendall(garbage)
        assert answered(visitor) == b""
        other.sendall(QUESTION)
        assert AgentLine.read(answered(other)) is not None
        slow.sendall(QUESTION[9:])
        assert AgentLine.read(answered(slow)) is not None


def test_visitors_that_say_nothing_keep_nobody_out() -> None:
    with agent() as port, ExitStack() as held:
        idle = [held.enter_context(connected(port)) for _ in range(2 * MOST_AT_ONCE)]
        with connected(port) as visitor:
            visitor.sendall(QUESTION)
            assert AgentLine.read(answered(visitor)) is not None
        assert answered(idle[0]) == b""


def answered(visitor: socket.socket) -> bytes:
    """All that it is sent until the other end hangs up."""
    said = b""
    while True:
        try:
            received = visitor.recv(65536)
        except ConnectionResetError:
            return said
        if not received:
            return said
        said += received
