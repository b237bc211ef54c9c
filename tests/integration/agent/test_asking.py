"""One agent asks another: the port that answers, and what silence, refusal and strange answers mean."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from queue import SimpleQueue

import pytest

from elastic_trainer.agent.suspicion.peers import (
    LONGEST_ANSWER,
    MOST_AT_ONCE,
    AgentPort,
    Asker,
    PeerReply,
    Question,
    StatusAnswer,
    StatusBoard,
    WorkerActivity,
    read,
)
from elastic_trainer.checkpoint.neighbours import COPIES
from elastic_trainer.clock import Deadline, pause
from tests.support.waiting import LIMIT_S

LOCAL = "127.0.0.1"
STANDING = WorkerActivity(local_rank=0, phase="training", waits=True, waits_s=1.5)
SHORT_S = 0.2


@pytest.fixture
def asker() -> Iterator[Asker]:
    """One of run ``run``."""
    asker = Asker("run", "me")
    yield asker
    asker.close()


@dataclass
class Agent:
    """One that answers."""

    notice: StatusBoard = field(default_factory=lambda: StatusBoard("run", "other"))

    def __enter__(self) -> Agent:
        self.port = AgentPort(LOCAL, self.notice.answer, socket.socket.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.port.close()

    def connect(self) -> socket.socket:
        return socket.create_connection((LOCAL, self.port.port), LIMIT_S)


def ask(asker: Asker, port: int, node: str = "other") -> None:
    asker.ask(node, (socket.AF_INET, (LOCAL, port)))


def heard(asker: Asker, limit_s: float = LIMIT_S) -> PeerReply | None:
    """The first thing to be heard, or None."""
    deadline = Deadline.after(limit_s)
    while not deadline.expired:
        found = asker.receive(deadline.remaining_s())
        if found:
            return found[0]
    return None


def test_an_agent_answers_what_its_workers_do(asker: Asker) -> None:
    """The newest that was put up, in its round; and it knows that it was asked."""
    with Agent() as agent:
        agent.notice.show(7, (STANDING,))
        ask(asker, agent.port.port)
        found = heard(asker)
        assert found is not None
        assert found.answer == StatusAnswer(run="run", node="other", round=7, workers=(STANDING,))
        assert (found.node, found.dead, asker.open) == ("other", False, {})
        assert agent.notice.asked_at > 0


def test_who_wants_copies_is_handed_over_and_the_port_answers_the_next() -> None:
    """However its first line arrives."""
    lent: SimpleQueue[socket.socket] = SimpleQueue()
    with closing(AgentPort(LOCAL, StatusBoard("run", "other").answer, lent.put)) as port:
        for pieces in ([COPIES], [COPIES[:3], COPIES[3:]]):
            with socket.create_connection((LOCAL, port.port), LIMIT_S) as client:
                for piece in pieces:
                    client.sendall(piece)
                    pause(SHORT_S)
                with lent.get(timeout=LIMIT_S) as taken:
                    taken.sendall(b"nonce")
                    assert client.recv(100) == b"nonce"
        with socket.create_connection((LOCAL, port.port), LIMIT_S) as client:
            client.sendall(Question(run="run", node="me").encode())
            assert read(StatusAnswer, client.recv(LONGEST_ANSWER)) is not None


def test_a_refused_connection_is_a_dead_agent(asker: Asker) -> None:
    """Nobody listens there any more."""
    with socket.socket() as unused:
        unused.bind((LOCAL, 0))
        ask(asker, unused.getsockname()[1])
        found = heard(asker)
        assert found is not None
        assert found.dead


def test_another_node_at_the_address_is_a_dead_agent(asker: Asker) -> None:
    """A node of the same run that was given the port later."""
    with Agent(StatusBoard("run", "somebody")) as agent:
        ask(asker, agent.port.port)
        found = heard(asker)
        assert found is not None
        assert found.dead


def test_an_agent_that_knows_no_questions_lives(asker: Asker) -> None:
    """An older version hangs up at once; one of another run answers nothing."""
    with (
        closing(AgentPort(LOCAL, lambda question: None, socket.socket.close)) as old,
        Agent(StatusBoard("another", "other")) as foreign,
    ):
        for port in (old.port, foreign.port.port):
            ask(asker, port)
            found = heard(asker)
            assert found is not None
            assert (found.answer, found.dead) == (None, False)


def test_silence_stays_an_open_question(asker: Asker) -> None:
    """The kernel of a frozen agent accepts, and nothing follows. It is asked once, until it is forgotten."""
    with socket.socket() as frozen:
        frozen.bind((LOCAL, 0))
        frozen.listen()
        ask(asker, frozen.getsockname()[1])
        since = asker.open["other"]
        assert heard(asker, SHORT_S) is None
        ask(asker, frozen.getsockname()[1])
        assert asker.open == {"other": since}
        asker.forget("other")
        assert asker.open == {}


@pytest.mark.parametrize(
    "garbage",
    [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b'{"version": 2, "run": "run", "node": "x"}\n', b"\xff\n"],
)
def test_garbage_gets_no_answer(garbage: bytes) -> None:
    """The connection is closed, and the next question is answered."""
    with Agent() as agent, agent.connect() as visitor:
        visitor.sendall(garbage)
        assert answered(visitor) == b""
        with agent.connect() as other:
            other.sendall(Question(run="run", node="me").encode())
            assert read(StatusAnswer, answered(other)) is not None


def test_a_question_in_pieces_is_answered() -> None:
    """A network may cut it anywhere."""
    with Agent() as agent, agent.connect() as visitor:
        line = Question(run="run", node="me").encode()
        visitor.sendall(line[:9])
        with agent.connect() as other:  # answered meanwhile: nobody waits for the rest
            other.sendall(line)
            assert read(StatusAnswer, answered(other)) is not None
        visitor.sendall(line[9:])
        assert read(StatusAnswer, answered(visitor)) is not None


def test_visitors_that_say_nothing_keep_nobody_out() -> None:
    """However many hang on: those that came first go."""
    with Agent() as agent, ExitStack() as held:
        idle = [held.enter_context(agent.connect()) for _ in range(2 * MOST_AT_ONCE)]
        with agent.connect() as visitor:
            visitor.sendall(Question(run="run", node="me").encode())
            assert read(StatusAnswer, answered(visitor)) is not None
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
