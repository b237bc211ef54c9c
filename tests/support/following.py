"""Commands that go on until they are ended: their lines as they come, and a monitor on a free port.

*Runs in* a test. *Owns* the process, and a thread that reads its output. *Fails by* AssertionError when no line comes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

LIMIT_S = 60.0
COMMAND = [sys.executable, "-m", "elastic_trainer.cli.main"]


class Following:
    """A command that goes on, and the lines that it prints; with ``complaints`` also those on stderr."""

    def __init__(self, *words: str, complaints: bool = False, command: Sequence[str] = COMMAND) -> None:
        stderr = subprocess.STDOUT if complaints else None
        self.process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=stderr, text=True)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def line(self) -> str:
        """The next one."""
        try:
            return self._lines.get(timeout=LIMIT_S)
        except Empty:
            raise AssertionError(f"no line came (exit code {self.process.poll()})") from None

    def until(self, wanted: Callable[[str], bool]) -> str:
        """The next one of its kind."""
        while not wanted(line := self.line()):
            pass
        return line

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def following(*words: str, complaints: bool = False, command: Sequence[str] = COMMAND) -> Iterator[Following]:
    """It is gone in the end."""
    running = Following(*words, complaints=complaints, command=command)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running._thread.join()
        assert running.process.stdout is not None
        running.process.stdout.close()


@contextmanager
def monitor(endpoint: str, *words: str, command: Sequence[str] = COMMAND) -> Iterator[tuple[Following, int]]:
    """A monitor on a free port."""
    words = ("monitor", "--endpoint", endpoint, "--listen", "127.0.0.1:0", *words)
    with following(*words, command=command) as running:
        yield running, int(running.line().rpartition(":")[2])
