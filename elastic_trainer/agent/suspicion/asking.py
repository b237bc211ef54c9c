"""Asks other nodes' agents what their workers do, many at once, without blocking on any of them.

*Runs in* one thread. *Owns* a connection for each open question.
*Fails by* nothing: any error that prevents an answer counts as silence.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.agent.suspicion.questions import LONGEST_ANSWER, Question, StatusAnswer, read
from elastic_trainer.clock import SYSTEM, Clock

Address = tuple[socket.AddressFamily, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class PeerReply:
    """The outcome of a question to ``node``: an ``answer``, or just a sign of life (None), or that it is ``dead``."""

    node: str
    after_s: float
    answer: StatusAnswer | None = None
    dead: bool = False


@dataclass(slots=True)
class _Open:
    node: str
    sent_at: float
    connection: socket.socket
    refused: int
    """The immediate error of the connection attempt; 0 if there was none."""
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
        """Since when each node's answer is pending."""
        return {name: each.sent_at for name, each in self._open.items()}

    def ask(self, node: str, address: Address) -> None:
        """Ask the agent of ``node``, unless a question to it is pending."""
        if node in self._open:
            return
        family, target = address
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        code = connection.connect_ex(target)
        code = 0 if code == errno.EINPROGRESS else code  # the result shows when the socket becomes writable
        self._open[node] = each = _Open(node, self._clock.monotonic(), connection, code)
        self._selector.register(connection, selectors.EVENT_WRITE, each)

    def receive(self, timeout_s: float) -> list[PeerReply]:
        """The outcomes that arrive within ``timeout_s`` seconds."""
        heard = []
        for key, events in self._selector.select(timeout_s):
            found = self._connected(key.data) if events & selectors.EVENT_WRITE else self._listen(key.data)
            if found is not None:
                self.forget(found.node)
                heard.append(found)
        return heard

    def forget(self, node: str) -> None:
        """Drop the question to ``node``."""
        each = self._open.pop(node, None)
        if each is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(each.connection)
            each.connection.close()

    def close(self) -> None:
        for node in list(self._open):
            self.forget(node)
        self._selector.close()

    def _connected(self, each: _Open) -> PeerReply | None:
        """The connection is established, or has failed."""
        code = each.refused or each.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._selector.unregister(each.connection)  # for example no route: that counts as silence
            return self._heard(each, dead=True) if code == errno.ECONNREFUSED else None
        try:
            each.connection.send(self._question)
        except OSError:
            return self._heard(each)  # it was alive, and has closed the connection
        self._selector.modify(each.connection, selectors.EVENT_READ, each)
        return None

    def _listen(self, each: _Open) -> PeerReply | None:
        try:
            received = each.connection.recv(LONGEST_ANSWER)
        except OSError:
            received = b""
        each.said += received
        if received and b"\n" not in received and len(each.said) <= LONGEST_ANSWER:
            return None
        answer = read(StatusAnswer, each.said)
        if answer is None or answer.run != self._run:
            return self._heard(each)  # an agent that supports no questions, or is not in this run
        return self._heard(each, answer, dead=answer.node != each.node)

    def _heard(self, each: _Open, answer: StatusAnswer | None = None, *, dead: bool = False) -> PeerReply:
        return PeerReply(each.node, self._clock.monotonic() - each.sent_at, answer, dead)
