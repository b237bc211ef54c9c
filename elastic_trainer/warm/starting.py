"""Starts programs from a template, or says why they must start cold.

*Runs in* the owner of the template (an agent, a local cluster), in any thread that lives as long as the owner.
*Owns* the template's process. *Fails by* :class:`ColdStart`: then the caller starts the program itself.
*Invariant*: a program that :meth:`Starter.start` did not return never runs: a fork waits for its owner's go-ahead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_trainer.warm.template import INHERITED, Facts, PythonCommand, adopting, decide, receive, send

PATIENCE_S = 120.0
"""Time limit of a template's answer: it may still be importing the program's modules."""
MOST_TEMPLATES = 6
"""After this many spoiled or dead templates all starts are cold."""
_BOOT = "from elastic_trainer.warm.template import main; main()"


class ColdStart(Exception):
    """The program must be started cold; the message says why."""


class Adopted(subprocess.Popen[bytes]):
    """A child of this process that its template has forked; can be awaited and signalled like any other."""

    _child_created = False

    def __init__(self, words: Sequence[str], pid: int) -> None:
        self._adopted = pid
        super().__init__(words)

    def _execute_child(self, *_: Any) -> None:
        self.pid, self._child_created = self._adopted, True


@dataclass(frozen=True, slots=True)
class StartRequest:
    """How to start a program. ``death_signal``: the signal it gets when its parent dies; ``own_template``: whether it
    starts programs itself, from a template of its own; ``host``: the first process of the host that it runs on, 0 for
    this process's own."""

    words: Sequence[str]
    environment: Mapping[str, str]
    stdin: int
    stdout: int
    stderr: int
    death_signal: int = 0
    own_template: bool = False
    host: int = 0


class Starter:
    """Keeps a template and starts programs from it; replaces a spoiled or dead template."""

    def __init__(
        self,
        preload: Sequence[str],
        options: Sequence[str],
        environment: Mapping[str, str],
        *,
        learn: bool,
        free: Collection[str] = (),
    ) -> None:
        self._preload, self._learn = tuple(preload), learn
        self._lock = threading.Lock()
        self._without: list[str] = []
        self._made = 0
        self._facts = Facts(sys.executable, tuple(options), os.getcwd(), dict(environment), tuple(free))
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        if INHERITED:
            self._link, pid, self._facts = INHERITED.pop()
            self._process = Adopted(["template"], pid)
        else:
            self._make()

    def _make(self) -> None:
        """Start a template; it imports in the background."""
        self._made += 1
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [self._facts.executable, *self._facts.options, "-c", _BOOT, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=self._facts.environment,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        start = {"preload": self._preload, "without": self._without, "learn": self._learn, "owner": os.getpid()}
        self._link = mine
        with contextlib.suppress(OSError):
            send(mine, {**start, "facts": asdict(self._facts)})

    def start(self, request: StartRequest) -> Adopted:
        """Start the program. Raises ColdStart."""
        command = decide(request.words, request.environment, os.getcwd(), self._facts)
        if isinstance(command, str):
            raise ColdStart(command)
        with self._lock:
            if self._link is None and self._made >= MOST_TEMPLATES:
                raise ColdStart(f"{self._made} templates were spoiled or died")
            if self._link is None:
                self._make()
                raise ColdStart("the template is being started")
            answer = self._ask(self._link, command, request)
            if "pid" in answer:
                return Adopted(request.words, answer["pid"])
            if answer["without"]:
                self._without.append(answer["without"])
                self._drop()
                self._make_again()
            raise ColdStart(answer["cold"])

    def await_imports(self, limit_s: float, also: Sequence[str] = ()) -> bool:
        """Wait until a program would be forked at once: False after ``limit_s``, or if programs start cold here.

        ``also``: modules that it is known to need, for a template that learns such modules.
        """
        with self._lock:
            if self._link is None:
                return False
            try:
                self._link.settimeout(min(limit_s, PATIENCE_S))
                send(self._link, {"also": list(also)})
                receive(self._link)
                return True
            except BaseException as error:  # its answer is still to come, and would be taken for the next one's
                self._drop()
                if isinstance(error, (OSError, EOFError)):
                    self._make_again()
                    return False
                raise

    def _ask(self, link: socket.socket, command: PythonCommand, request: StartRequest) -> dict[str, Any]:
        hear, say = os.pipe()
        order = {
            "command": asdict(command),
            "words": list(request.words),
            "environment": dict(request.environment),
            "death_signal": request.death_signal,
            "own_template": request.own_template,
            "host": request.host,
            "owner": os.getpid(),
        }
        try:
            link.settimeout(PATIENCE_S)
            with adopting():
                send(link, order, [request.stdin, request.stdout, request.stderr, hear])
                answer, _ = receive(link)
            if "pid" in answer:
                os.waitid(os.P_PID, answer["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it is this process's child
                os.write(say, b"g")
        except BaseException as error:  # including an exception by a signal handler of torchrun: the fork must not run
            code = self._drop()
            if isinstance(error, TimeoutError):
                raise ColdStart(f"the template did not answer within {PATIENCE_S:g} s") from error
            if isinstance(error, (OSError, EOFError)):
                self._make_again()
                raise ColdStart(f"the template has ended (exit code {code})") from error
            raise
        finally:
            os.close(hear)
            os.close(say)
        return answer

    def _make_again(self) -> None:
        if self._made < MOST_TEMPLATES:
            self._make()

    def _drop(self) -> int | None:
        """End the template; returns its exit code if it had ended by itself."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is not None:
            link.close()
        if process is None:
            return None
        code = process.poll()
        process.kill()
        process.wait()
        return code

    def close(self) -> None:
        """End the template; the programs continue."""
        with self._lock:
            self._made = MOST_TEMPLATES
            self._drop()
