"""The trap: whoever forms a process group by itself in place is caught, once."""

from __future__ import annotations

import socket
import threading

import pytest

from elastic_trainer.agent.trap import Trap
from tests.support.crew import LIMIT_S


def test_whoever_connects_is_caught_once() -> None:
    """Several workers of one node do so at the same time."""
    caught, times = threading.Event(), list[int]()

    def note() -> None:
        times.append(1)
        caught.set()

    trap = Trap(note)
    try:
        for _ in range(3):
            socket.create_connection(("127.0.0.1", trap.port), LIMIT_S).close()
        assert caught.wait(LIMIT_S)
        trap._thread.join(LIMIT_S)
        assert times == [1]
    finally:
        trap.close()


def test_closing_catches_nobody_and_frees_the_port() -> None:
    """The node ends in good order."""
    caught = threading.Event()
    trap = Trap(caught.set)
    trap.close()
    trap._thread.join(LIMIT_S)
    assert not trap._thread.is_alive()
    assert not caught.is_set()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", trap.port), LIMIT_S)
