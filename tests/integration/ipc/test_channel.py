"""The channel and the life mutex, between real processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.ipc.channel import (
    ChannelClosedError,
    Connection,
    Hello,
    Listener,
    Over,
    connect,
    read_from_agent,
    read_from_worker,
)
from elastic_trainer.ipc.mutex import LifeMutex, await_death
from tests.support.small_disk import fill, mounted
from tests.support.waiting import eventually

BOUND_S = 30.0


def test_messages_cross_the_channel_in_order_and_typed() -> None:
    """What one end sends the other reads, as the same values; the kernel tells who the peer is."""
    received: list[object] = []
    done = threading.Event()

    def serve(connection: Connection) -> None:
        assert connection.peer() == (os.getpid(), os.geteuid())
        connection.send(Over(number=3, reason="node b is gone"))
        received.extend(read_from_worker(line) for line in connection.lines())
        done.set()

    listener = Listener(serve)
    worker = connect(listener.path)
    worker.send(Hello(pid=1, local_rank=0))
    worker.send(Hello(pid=2, local_rank=1))
    assert read_from_agent(next(worker.lines())) == Over(number=3, reason="node b is gone")
    worker.close()
    assert done.wait(BOUND_S)
    assert received == [Hello(pid=1, local_rank=0), Hello(pid=2, local_rank=1)]
    listener.close()


def test_a_long_temporary_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems give each job a TMPDIR that may be longer than a unix socket's address can be."""
    long = tmp_path / ("job" * 40)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    heard = threading.Event()

    def serve(connection: Connection) -> None:
        next(connection.lines())
        heard.set()

    listener = Listener(serve)
    worker = connect(listener.path)
    worker.send(Hello(pid=1, local_rank=0))
    assert heard.wait(BOUND_S)
    worker.close()
    listener.close()
    with pytest.raises(ChannelClosedError, match="does not listen"):
        connect(listener.path)


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_a_moment_without_descriptors_or_threads_costs_one_connection_at_most(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later workers are heard, and the listener still ends."""
    heard, failures = threading.Event(), [OSError(errno.EMFILE, "out of descriptors")]
    accept, start = socket.socket.accept, threading.Thread.start

    def accepts(listening: socket.socket) -> tuple[socket.socket, Any]:
        if what == "descriptors" and failures:
            raise failures.pop()
        return accept(listening)

    def starts(thread: threading.Thread) -> None:
        if what == "threads" and thread.name.startswith("worker-") and failures:
            failures.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    monkeypatch.setattr(threading.Thread, "start", starts)
    listener = Listener(lambda connection: heard.set() if next(connection.lines()) else None)
    first = connect(listener.path)
    if what == "threads":
        assert list(first.lines()) == []
    worker = connect(listener.path)
    worker.send(Hello(pid=1, local_rank=0))
    assert heard.wait(BOUND_S)
    assert not failures
    for each in (first, worker, listener):
        each.close()
    eventually(lambda: "channel" not in {each.name for each in threading.enumerate()}, "it still listens")


HOLDER = """
import sys, threading, time
from pathlib import Path
from elastic_trainer.ipc.mutex import LifeMutex
mutex = LifeMutex(Path(sys.argv[1]))
def hold():
    mutex.hold(); print("held", flush=True); threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
threading.Event().wait()
"""


def test_life_mutex_tells_of_a_sigkill(tmp_path: Path) -> None:
    """The waiter is told that the holder died, soon after SIGKILL and not before; the file does not stay behind."""
    path = tmp_path / "mutex"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "held"
    told: list[tuple[bool, float]] = []
    waiter = threading.Thread(target=lambda: told.append((await_death(path), time.monotonic())), daemon=True)
    waiter.start()
    waiter.join(0.3)
    assert not told
    killed_at = time.monotonic()
    os.kill(holder.pid, signal.SIGKILL)
    waiter.join(BOUND_S)
    assert told
    assert told[0][0] is True
    assert told[0][1] - killed_at < BOUND_S
    assert not path.exists()
    holder.wait()
    holder.stdout.close()


def test_on_a_full_disk_a_life_mutex_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    """The worker trains without it; and once there is room the same name can be used."""
    with mounted(tmp_path / "small", 1 << 16) as disk:
        ballast, path = fill(disk), disk / "mutex"
        found = subprocess.run([sys.executable, "-c", HOLDER, str(path)], capture_output=True, text=True, check=False)
        assert "No space left on device" in found.stderr
        assert found.returncode == 1
        assert not path.exists()
        ballast.unlink()
        LifeMutex(path).hold()
