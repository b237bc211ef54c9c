"""The agent's end of the channel on real sockets: who is admitted, what is passed on, and how a death is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from elastic_trainer.agent.workers.conductor import Worker
from elastic_trainer.agent.workers.conductor_shell import ChannelServer, ConductorShell
from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.ipc.channel import (
    CHANNEL_VERSION,
    Connection,
    Exit,
    Hello,
    Message,
    connect,
    read_from_agent,
)
from tests.support.waiting import LIMIT_S, eventually

HOLDER = """
import os, sys
from pathlib import Path
from elastic_trainer.ipc.channel import connect
from elastic_trainer.ipc.channel import Hello
from elastic_trainer.ipc.mutex import LifeMutex

connection = connect(Path(sys.argv[1]))
mutex = LifeMutex(Path(sys.argv[1]).parent / f"life-{os.getpid()}")
if os.fork() == 0:
    sys.stdin.read()  # keeps the socket open after its parent's death, so that only the mutex can tell
    os._exit(0)
mutex.hold()
connection.send(Hello(pid=os.getpid(), local_rank=1, mutex=str(mutex.path)))
sys.stdin.read()
"""


class WorkerHandler:
    """Admits everybody and keeps what it hears."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.left = threading.Event()

    def admit(self, connection: Connection, pid: int, local_rank: int) -> Worker | None:
        self.workers.append(Worker(connection, pid, local_rank, life=1))
        return self.workers[-1]

    def receive(self, worker: Worker, message: Message) -> None: ...

    def gone(self, worker: Worker) -> None:
        self.left.set()


@pytest.fixture
def handler() -> WorkerHandler:
    return WorkerHandler()


@pytest.fixture
def server(handler: WorkerHandler) -> Iterator[ChannelServer]:
    server = ChannelServer(cast("ConductorShell", handler))
    yield server
    server.close()
    assert not server.path.parent.exists()


def test_a_worker_of_another_version_is_sent_away(server: ChannelServer, handler: WorkerHandler) -> None:
    """With the status for wrong configuration, and both versions in the reason."""
    connection = connect(server.path)
    connection.send(Hello(pid=1, local_rank=0, version=CHANNEL_VERSION + 1))
    answer = read_from_agent(next(connection.lines()))
    reason = f"the worker speaks channel version {CHANNEL_VERSION + 1}, its agent {CHANNEL_VERSION}"
    assert answer == Exit(code=EXIT_CONFIG, reason=reason)
    assert handler.workers == []
    connection.close()


def test_a_worker_that_talks_nonsense_counts_as_lost(server: ChannelServer, handler: WorkerHandler) -> None:
    connection = connect(server.path)
    connection.send(Hello(pid=1, local_rank=0))
    connection._socket.sendall(b'{"kind": "song"}\n')
    assert handler.left.wait(LIMIT_S)
    connection.close()


def test_the_death_of_a_worker_shows_in_its_mutex(server: ChannelServer, handler: WorkerHandler) -> None:
    """The kernel passes on the mutex at once; the socket may still be open in a child."""
    command = [sys.executable, "-c", HOLDER, str(server.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        eventually(lambda: bool(handler.workers), "the worker does not come")
        os.kill(holder.pid, signal.SIGKILL)
        assert handler.left.wait(LIMIT_S / 2)
        holder.kill()
