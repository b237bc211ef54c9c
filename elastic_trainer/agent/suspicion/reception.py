"""Answers on the port that shows that this agent lives: one line in, one line out.

A frozen agent's kernel still accepts connections, but nobody answers; that is what a question is for. A peer that only
connects and hangs up has learned that the agent lives.

*Runs in* a thread of the agent that does nothing else and never waits for anybody: no lock, no store, no slow peer.
*Owns* the listening socket, and the connections that it has accepted, a bounded number: the oldest one goes first.
*Fails by* nothing: a peer that sends no question gets no answer.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import Final

from elastic_trainer.clock import pause
from elastic_trainer.telemetry.logs import logger

LONGEST_QUESTION: Final = 512
MOST_AT_ONCE: Final = 64
LOOKS_UP_S: Final = 1.0
"""How late it learns that it is closing, where a socket that is shut down wakes nobody."""
_RETRY_S: Final = 0.05

Answering = Callable[[bytes], bytes | None]


def no_answer(question: bytes) -> bytes | None:
    """For an agent that has nothing to say."""
    return None


class Reception:
    """See the module. ``answer(question)`` gives the line to send, or None."""

    def __init__(self, listening: socket.socket, answer: Answering, closing: Callable[[], bool]) -> None:
        self._listening, self._answer, self._closing = listening, answer, closing
        self._said: dict[socket.socket, bytes] = {}
        """What each visitor has sent, the oldest visitor first."""

    def run(self) -> None:
        with self._listening, selectors.DefaultSelector() as self._selector:
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
            while not self._closing():
                try:
                    self._turn()
                except Exception:  # noqa: BLE001 - the edge of a thread: without it this node would seem to be frozen
                    logger().exception("reception.failed")
                    pause(_RETRY_S)
            for visitor in list(self._said):
                self._dismiss(visitor)

    def _turn(self) -> None:
        for key, _ in self._selector.select(LOOKS_UP_S):
            if key.fileobj is self._listening:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:
                self._listen(key.fileobj)

    def _accept(self) -> None:
        if len(self._said) >= MOST_AT_ONCE:
            self._dismiss(next(iter(self._said)))
        try:
            visitor, _ = self._listening.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError:
            if not self._closing():
                pause(_RETRY_S)  # no descriptor is left, say
            return
        visitor.setblocking(False)
        self._said[visitor] = b""
        self._selector.register(visitor, selectors.EVENT_READ)

    def _listen(self, visitor: socket.socket) -> None:
        try:
            received = visitor.recv(LONGEST_QUESTION)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        question, end, _ = (self._said[visitor] + received).partition(b"\n")
        if received and not end and len(question) <= LONGEST_QUESTION:
            self._said[visitor] = question
            return
        if end and (line := self._answer(question)) is not None:
            with contextlib.suppress(OSError):
                visitor.send(line)  # into a buffer that is empty
        self._dismiss(visitor)

    def _dismiss(self, visitor: socket.socket) -> None:
        del self._said[visitor]
        self._selector.unregister(visitor)
        visitor.close()
