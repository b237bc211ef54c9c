"""The trap: a worker that forms a process group by itself in place is caught, once; nobody else is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from elastic_trainer.agent.rendezvous.in_place import PlainScriptGuard, descendants
from tests.support.waiting import LIMIT_S

CONNECT = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
sys.stdin.readline()
with socket.socket(family, socket.SOCK_STREAM) as connection:
    connection.connect((sys.argv[1], int(sys.argv[2])))
    connection.recv(1)
"""
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


class Trapped:
    """A trap whose suspects are all children of this process, but for those that have opened a Session."""

    def __init__(self) -> None:
        self.times = 0
        self.caught = threading.Event()
        self.opened: set[int] = set()
        self.trap = PlainScriptGuard(self._note, lambda: descendants(os.getpid(), self.opened))

    def _note(self) -> None:
        self.times += 1
        self.caught.set()


@pytest.fixture
def trapped() -> Iterator[Trapped]:
    it = Trapped()
    yield it
    it.trap.close()
    it.trap._thread.join(LIMIT_S)
    assert not it.trap._thread.is_alive()


@contextmanager
def child(trapped: Trapped, address: str, *between: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that connects when it is asked to, and waits for an answer, as a client of torch's store does."""
    command = [sys.executable, "-c", *between, CONNECT, address, str(trapped.trap.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def connect(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"connect\n")
    process.stdin.flush()


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_workers_that_connect_are_caught_once(trapped: Trapped, address: str) -> None:
    """Several of one node do so at the same time, and torch prefers sockets of IPv6."""
    with child(trapped, address) as one, child(trapped, address) as other:
        connect(one)
        connect(other)
        assert trapped.caught.wait(LIMIT_S)
        trapped.trap._thread.join(LIMIT_S)
    assert trapped.times == 1


def test_a_flood_of_strangers_hides_no_worker(trapped: Trapped) -> None:
    """More are connected than the trap takes one by one: the worker among them, behind a shell, is found."""
    with ExitStack() as stack:
        for _ in range(300):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", trapped.trap.port))
        assert not trapped.caught.is_set()
        connect(stack.enter_context(child(trapped, "127.0.0.1", BETWEEN)))
        assert trapped.caught.wait(LIMIT_S)


def test_what_has_a_session_may_connect(trapped: Trapped) -> None:
    with child(trapped, "127.0.0.1", BETWEEN) as process:
        trapped.opened.add(process.pid)
        connect(process)
        assert process.wait(LIMIT_S) == 0
    trapped.trap.close()
    trapped.trap._thread.join(LIMIT_S)
    assert not trapped.caught.is_set()
    with pytest.raises(ConnectionRefusedError):  # closing frees the port
        socket.create_connection(("127.0.0.1", trapped.trap.port), LIMIT_S)
