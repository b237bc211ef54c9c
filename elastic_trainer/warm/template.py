"""The template: imports modules once, then forks a process for each request of its owner.

A request is a length, a JSON object and four descriptors: standard input, output and error of the fork, and a pipe by
which the owner starts it. An empty object is answered when the named modules are imported. A process between template
and fork exits at once, so that the fork becomes a child of the owner, which can wait for it and read its exit code like
that of any other child.

*Runs in* its own process, with one thread. *Owns* no file.
*Fails by* exiting; its owner then starts programs cold. *Invariant*: it dies with the thread of its owner that started
it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_trainer.warm import identity
from elastic_trainer.warm.fitness import Facts, PythonCommand
from elastic_trainer.warm.learning import ImportRecorder
from elastic_trainer.warm.preloading import Preloading, Refused, skip_last_collection
from elastic_trainer.warm.program import first_entry, run

TITLE = "elastic-trainer: template of processes"
EXIT_ORPHAN = 75
QUIET_S = 5.0
"""Seconds after the last learned name: by then the worker has finished its own imports."""
_HEADER = 8
_PIECE = 1 << 16
_DESCRIPTORS = 4


@dataclass(frozen=True, slots=True)
class Start:
    """The start-up data of a template."""

    preload: Sequence[str]
    without: Sequence[str]
    learn: bool
    owner: int
    facts: Facts


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    content = json.dumps(message).encode()
    socket.send_fds(link, [len(content).to_bytes(_HEADER, "little")], list(descriptors))
    link.sendall(content)


def receive(link: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive one message. Raises EOFError when the other end is closed."""
    header, found, _, _ = socket.recv_fds(link, _HEADER, descriptors)
    if len(header) != _HEADER:
        raise EOFError
    left, pieces = int.from_bytes(header, "little"), []
    while left:
        pieces.append(link.recv(min(left, _PIECE)))
        if not pieces[-1]:
            raise EOFError
        left -= len(pieces[-1])
    message: dict[str, Any] = json.loads(b"".join(pieces))
    return message, list(found)


@dataclass(frozen=True, slots=True)
class Program:
    """The program that a fork runs."""

    command: PythonCommand
    words: list[str]
    installed: str


@dataclass(frozen=True, slots=True)
class InheritedTemplate:
    """A template that this process, itself a fork, has inherited from its own template."""

    link: socket.socket
    pid: int
    facts: Facts


INHERITED: list[InheritedTemplate] = []
"""At most one: a fork that starts programs itself need not import everything again."""


class Template:
    """Serves its owner at the other end of ``link``; in a fork, :meth:`serve` returns the program to run."""

    def __init__(self, link: socket.socket, start: Start, modules: Preloading, installed: str, flaw: str) -> None:
        self._link, self._start, self._modules, self._installed = link, start, modules, installed
        self._pending = [(name, True) for name in start.preload]
        self._learned, self._taught = socket.socketpair()
        self._rest, self._known, self._heard = "", set(start.preload), 0.0
        self._working = True
        self._flaw, self._flawed = flaw, ""
        """Why forking is impossible here, and the responsible module."""

    def serve(self) -> Program:
        """Import, learn and fork until the owner has ended; returns only in a fork."""
        while True:
            quiet_s = 0.0 if self._working else self._heard + QUIET_S - time.monotonic()
            limit_s = max(0.0, quiet_s) if self._pending else None
            ready = select.select([self._link, self._learned], [], [], limit_s)[0]
            if self._link in ready:
                program = self._answer()
                if program is not None:
                    return program
            elif self._learned in ready:
                self._receive((self._rest + self._learned.recv(_PIECE).decode(errors="replace")).split("\n"))
            else:
                self._working = True
                self._load_next()

    def _receive(self, lines: list[str]) -> None:
        *names, self._rest = lines
        fresh = [name for name in dict.fromkeys(names) if name not in self._known]
        if fresh:
            self._known.update(fresh)
            self._pending += [(name, False) for name in fresh]
            self._heard = time.monotonic()

    def _load_next(self) -> None:
        name, named = self._pending.pop(0)
        try:
            self._modules.load(name, named=named)
        except Refused as refused:
            self._flaw, self._flawed = str(refused), refused.module
            self._pending.clear()
        if not self._pending:
            self._working = False
            self._modules.settle()

    def _answer(self) -> Program | None:
        try:
            order, descriptors = receive(self._link, _DESCRIPTORS)
        except (EOFError, OSError):
            os._exit(0)
        while self._pending and self._pending[0][1] and not self._flaw:
            self._load_next()  # the program would import these too
        if not order:
            send(self._link, {})
            return None
        command = PythonCommand(**order["command"])
        hidden = self._modules.hidden_by(first_entry(command))
        if self._flaw:
            reason = self._flaw
        elif not command.module and not (command.target.endswith(".py") and os.path.isfile(command.target)):
            reason = f"{command.target} is not a Python file"
        elif hidden is not None:
            reason = f"{hidden} shadows a module of the template"
        else:
            return self._fork(command, order, descriptors)
        for each in descriptors:
            os.close(each)
        send(self._link, {"cold": reason, "without": self._flawed})
        return None

    def _fork(self, command: PythonCommand, order: dict[str, Any], descriptors: list[int]) -> Program | None:
        hear, say = os.pipe()
        middle = os.fork()
        if middle == 0:
            with identity.next_child_on(order["host"]):
                child = os.fork()
            if child != 0:
                os.write(say, child.to_bytes(_HEADER, "little"))
                os._exit(0)
            os.close(hear)
            os.close(say)
            return self._become(command, order, descriptors)
        for each in (say, *descriptors):
            os.close(each)
        pid = int.from_bytes(os.read(hear, _HEADER), "little")
        os.close(hear)
        os.waitpid(middle, 0)
        send(self._link, {"pid": pid} if pid else {"cold": "the template could not fork", "without": ""})
        return None

    def _become(self, command: PythonCommand, order: dict[str, Any], descriptors: list[int]) -> Program | None:
        """Become the requested program; None in the template of such a fork."""
        *standard, go = descriptors
        self._link.close()
        if os.read(go, 1) != b"g":
            os._exit(0)  # the owner has given up and started the program cold
        for number, each in enumerate(standard):
            os.dup2(each, number)
        for each in descriptors:
            os.close(each)
        if order["host"]:
            identity.enter_host(order["host"])
        if order["own_template"] and self._fork_template():
            return None
        os.setsid()
        if order["death_signal"]:
            identity.die_with_parent(order["death_signal"])
            if os.getppid() != (0 if order["host"] else order["owner"]):  # an owner on another host is seen as 0
                os._exit(EXIT_ORPHAN)
        gc.enable()
        atexit.register(skip_last_collection)
        self._learned.close()
        if self._start.learn:
            sys.meta_path.insert(0, ImportRecorder(self._taught.detach()))
        else:
            self._taught.close()
        identity.show(order["words"], order["environment"])
        self._modules.leave(self._modules.environment(order["environment"]))
        return Program(command, order["words"], self._installed)

    def _fork_template(self) -> bool:
        """Fork a template for this process: True in it."""
        mine, its = socket.socketpair()
        owner = os.getpid()
        child = os.fork()
        if child != 0:
            its.close()
            facts = self._start.facts  # this process also passes on the variables that the imports have set
            given = self._modules.environment(dict(facts.environment))
            INHERITED.append(InheritedTemplate(mine, child, replace(facts, environment=given)))
            return False
        mine.close()
        os.setsid()
        _die_with(owner)
        self._link = its
        self._learned, self._taught = socket.socketpair()
        return True


def _die_with(owner: int) -> None:
    identity.die_with_parent(signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(EXIT_ORPHAN)


def main() -> None:
    """``python -c "from ... import main; main()" DESCRIPTOR``: serve, and in a fork run its program."""
    gc.disable()  # imports leave next to no garbage: looking for it takes an eighth of their time
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    values, _ = receive(link)
    start = Start(**{**values, "facts": Facts(**values["facts"])})
    _die_with(start.owner)
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory: a program gets its own entry
    installed = sys.path[0]
    flaw = ""
    try:
        identity.show([TITLE], os.environ)
    except OSError as error:
        flaw = f"this kernel does not let a fork change its displayed command ({error})"
    program = Template(link, start, Preloading(start.without), installed, flaw).serve()
    run(program.command, program.words, program.installed)
