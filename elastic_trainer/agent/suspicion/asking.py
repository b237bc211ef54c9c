"""Asks the agents of other nodes what their workers do, many at once, and never waits for one of them.

*Runs in* one thread. *Owns* a connection for each question that is open.
*Fails by* nothing: whatever keeps an answer away is silence.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.agent.suspicion.questions import LONGEST_ANSWER, NoticeAnswer, Question, read
from elastic_trainer.clock import SYSTEM, Clock

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class HeardAnswers:
    """What came of a question to ``node``: an ``answer``, or at least a sign of life (None), or that it is ``dead``."""

    node: str
    after_s: float
    answer: NoticeAnswer | None = None
    dead: bool = False


@dataclass(slots=True)
class _Open:
    node: str
    sent_at: float
    connection: socket.socket
    refused: int
    """The error that connecting ended with at once; 0 if it did not."""
    said: bytes = b""


class Asker:
    """See the module."""

    def __init__(self, run: str, node: str, clock: Clock = SYSTEM) -> None:
        self._run, self._clock = run, clock
        self._question: Final = Question(run=run, node=node).encode()
        self._selector = selectors.DefaultSelector()
        self._open: dict[str, _Open] = {}

    @property
    def open(self) -> dict[str, float]:
        """Since when each node's answer is awaited."""
        return {name: each.sent_at for name, each in self._open.items()}

    def ask(self, node: str, address: Address) -> None:
        """Ask the agent of ``node``, unless its answer is awaited already."""
        if node in self._open:
            return
        family, target = address
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex(target)
        code = 0 if code == errno.EINPROGRESS else code  # what comes of it shows when it can be written to
        self._open[node] = each = _Open(node, self._clock.monotonic(), connection, code)
        self._selector.register(connection, selectors.EVENT_WRITE, each)

    def hear(self, timeout_s: float) -> list[HeardAnswers]:
        """What has come, waited for ``timeout_s`` seconds at most."""
        heard = []
        for key, events in self._selector.select(timeout_s):
            found = self._connected(key.data) if events & selectors.EVENT_WRITE else self._listen(key.data)
            if found is not None:
                self.forget(found.node)
                heard.append(found)
        return heard

    def forget(self, node: str) -> None:
        """Nobody awaits its answer any more."""
        each = self._open.pop(node, None)
        if each is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(each.connection)
            each.connection.close()

    def close(self) -> None:
        for node in list(self._open):
            self.forget(node)
        self._selector.close()

    def _connected(self, each: _Open) -> HeardAnswers | None:
        """The connection is there, or will never be."""
        code = each.refused or each.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._selector.unregister(each.connection)  # no route, say: that is silence
            return self._heard(each, dead=True) if code == errno.ECONNREFUSED else None
        try:
            each.connection.send(self._question)
        except OSError:
            return self._heard(each)  # it was there, and has hung up
        self._selector.modify(each.connection, selectors.EVENT_READ, each)
        return None

    def _listen(self, each: _Open) -> HeardAnswers | None:
        try:
            received = each.connection.recv(LONGEST_ANSWER)
        except OSError:
            received = b""
        each.said += received
        if received and b"\n" not in received and len(each.said) <= LONGEST_ANSWER:
            return None
        answer = read(NoticeAnswer, each.said)
        if answer is None or answer.run != self._run:
            return self._heard(each)  # an agent that knows no questions, or does not know this run
        return self._heard(each, answer, dead=answer.node != each.node)

    def _heard(self, each: _Open, answer: NoticeAnswer | None = None, *, dead: bool = False) -> HeardAnswers:
        return HeardAnswers(each.node, self._clock.monotonic() - each.sent_at, answer, dead)
